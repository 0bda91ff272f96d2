// Three linked planes of a case on 2-D canvases. The page's JSON describes the cases, its base64
// scripts hold the voxels: gzip of the differences to the mean of the three neighbours before,
// decoded when they are first shown.
(() => {
  "use strict";

  // Axes are R A S, and pictures run against them: the patient's right is on the left, anterior and
  // superior are on top.
  const PLANES = [
    { name: "axial", across: 0, down: 1, through: 2, letters: "RLAP" },
    { name: "coronal", across: 0, down: 2, through: 1, letters: "RLSI" },
    { name: "sagittal", across: 1, down: 2, through: 0, letters: "APSI" },
  ];
  const NOT_ANNOTATED = "#a8a8a8"; // lines over voxels of the truth that are to be ignored
  const HATCH = 4; // voxels from one line to the next
  const ERRORS = { missed: "#2a66ff", false: "#ff4a33", both: "#c388ff" };
  const OPAQUE = 0xff000000; // of a little-endian RGBA pixel

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const rgb = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  const times = (matrix, voxel) =>
    matrix.map((row) => row[3] + row[0] * voxel[0] + row[1] * voxel[1] + row[2] * voxel[2]);
  const number = (value) => Number(value.toPrecision(4)).toString();

  function element(tag, text, properties = {}) {
    return Object.assign(document.createElement(tag), { textContent: text }, properties);
  }

  async function unpack(base64, [nx, ny, nz]) {
    const packed = Uint8Array.from(atob(base64.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const voxels = new Uint8Array(await new Response(stream).arrayBuffer());
    const plane = ny * nz;
    for (let x = 0, index = 0; x < nx; x++)
      for (let y = 0; y < ny; y++)
        for (let z = 0; z < nz; z++, index++) {
          const before =
            (x && voxels[index - plane]) + (y && voxels[index - nz]) + (z && voxels[index - 1]);
          voxels[index] += (before / 3) | 0; // modulo 256
        }
    return voxels;
  }

  function start(root, fail) {
    const find = (name) => root.querySelector(`[data-is="${name}"]`);
    const cases = JSON.parse(find("cases").textContent);
    const [list, modality, region, answer, preset] = [
      "list",
      "modality",
      "region",
      "answer",
      "preset",
    ].map(find);
    const [truthOn, answerOn, errorOn, opacity] = [
      "truth-on",
      "answer-on",
      "error-on",
      "opacity",
    ].map(find);
    const volumes = new Map(); // decoded volumes, as promises
    // Ids of the volumes that are there already; others follow this script.
    const present = new Set(Array.from(root.querySelectorAll("script[id]"), (script) => script.id));
    const planes = PLANES.map((plane) => ({
      ...plane,
      canvas: find(plane.name),
      slider: find(`${plane.name}-slice`),
      title: find(`${plane.name}-title`),
      bitmap: document.createElement("canvas"),
    }));
    let shown = cases[0]; // the case
    let crosshair = shown.start.slice(); // the crosshair's voxel, in the box that the page holds
    let windows = new Map(); // modality -> [low, high] that black and white stand for
    let image, truth, prediction; // voxels of the chosen volumes
    let opacityBefore = 0.5;
    let asked = 0;

    async function load(id, shape) {
      if (!present.has(id) && document.readyState === "loading")
        await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
      return unpack(document.getElementById(id).textContent, shape);
    }
    const volume = (id) => {
      if (!volumes.has(id)) volumes.set(id, load(id, shown.shape));
      return volumes.get(id);
    };
    const channel = () => shown.modalities[modality.selectedIndex];
    const regions = () =>
      region.value === "" ? shown.regions : [shown.regions[Number(region.value)]];
    const greyWindow = () => windows.get(channel()) || channel().window;
    const intensity = (level) => {
      const { low, high, levels, values } = channel();
      return values ? values[level - 1] : low + ((level - 1) * (high - low)) / (levels - 1);
    };
    const offset = (x, y, z) => (x * shown.shape[1] + y) * shown.shape[2] + z;

    // --- Drawing ---

    function greys() {
      const [low, high] = greyWindow();
      const table = new Uint8Array(256);
      for (let level = 1; level <= channel().levels; level++)
        table[level] = Math.round(clamp((intensity(level) - low) / (high - low), 0, 1) * 255);
      return table;
    }

    // Label code -> 1 + position of its innermost region among those that are shown, 0 for none.
    function innermost() {
      const table = new Uint8Array(256);
      const outerFirst = regions().map((area, position) => [area, position]);
      outerFirst.sort(([a], [b]) => b.codes.length - a.codes.length);
      for (const [area, position] of outerFirst)
        for (const code of area.codes) table[code] = position + 1;
      return table;
    }

    function errorOf(inTruth, inPrediction) {
      if (inTruth === inPrediction) return inTruth ? "both" : null;
      if (!inTruth || !inPrediction) return inTruth ? "missed" : "false";
      const size = (number) => regions()[number - 1].codes.length; // a smaller region is further in
      return size(inTruth) <= size(inPrediction) ? "missed" : "false";
    }

    function overlay() {
      const table = innermost();
      const colours = [null, ...regions().map((area) => rgb(area.colour))];
      const outlines = colours.map((colour) => colour && [...colour, 1]); // opaque
      const errorColours = Object.fromEntries(
        Object.entries(ERRORS).map(([name, hex]) => [name, rgb(hex)]),
      );
      const withTruth = truth && truthOn.checked;
      const withAnswer = prediction && answerOn.checked;
      const inTruth = (voxel) => table[truth[voxel]];
      const inAnswer = (voxel) => table[prediction[voxel]];
      const withError = truth && prediction && errorOn.checked;
      const ignored = withTruth || withError ? shown.ignore : null;
      const lines = rgb(NOT_ANNOTATED);
      if (!Number(opacity.value)) return () => null;
      return (voxel, neighbours, onLine) => {
        if (ignored !== null && truth[voxel] === ignored) {
          if (onLine) return lines;
          return withAnswer && !withError ? colours[inAnswer(voxel)] : null;
        }
        if (withError) return errorColours[errorOf(inTruth(voxel), inAnswer(voxel))] || null;
        if (!withAnswer) return withTruth ? colours[inTruth(voxel)] : null;
        const here = withTruth && inTruth(voxel);
        return here && neighbours.some((neighbour) => inTruth(neighbour) !== here)
          ? outlines[here]
          : colours[inAnswer(voxel)];
      };
    }

    function draw() {
      const table = greys();
      const colourOf = overlay();
      const alpha = Number(opacity.value);
      for (const plane of planes) {
        paint(plane, table, colourOf, alpha);
        compose(plane);
      }
      readOut();
      root.dataset.at = crosshair.join(" ");
      root.dataset.firstPictureMs ||= Math.round(performance.now());
    }

    // One pixel a voxel.
    function paint({ bitmap, across, down, through }, table, colourOf, alpha) {
      const { shape } = shown;
      const strides = [shape[1] * shape[2], shape[2], 1];
      const [width, height] = [shape[across], shape[down]];
      bitmap.width = width;
      bitmap.height = height;
      const context = bitmap.getContext("2d");
      const picture = context.createImageData(width, height);
      const pixels = new Uint32Array(picture.data.buffer);
      const neighbours = [0, 0, 0, 0];
      for (let row = 0, pixel = 0; row < height; row++)
        for (let column = 0; column < width; column++, pixel++) {
          const a = width - 1 - column;
          const b = height - 1 - row;
          const voxel =
            crosshair[through] * strides[through] + a * strides[across] + b * strides[down];
          neighbours[0] = a > 0 ? voxel - strides[across] : voxel;
          neighbours[1] = a < width - 1 ? voxel + strides[across] : voxel;
          neighbours[2] = b > 0 ? voxel - strides[down] : voxel;
          neighbours[3] = b < height - 1 ? voxel + strides[down] : voxel;
          const grey = table[image[voxel]];
          const colour = colourOf(voxel, neighbours, (row + column) % HATCH === 0);
          let [red, green, blue] = [grey, grey, grey];
          if (colour) {
            const share = colour[3] || alpha;
            [red, green, blue] = colour.map((value) => grey + share * (value - grey));
          }
          pixels[pixel] = OPAQUE | (blue << 16) | (green << 8) | red;
        }
      context.putImageData(picture, 0, 0);
    }

    // The bitmap in true proportions, crosshair and letters.
    function compose({ canvas, bitmap, across, down, letters }) {
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
      canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
      const { width, height } = canvas;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false; // a pixel is a voxel's, and no mixture
      context.drawImage(bitmap, 0, 0, width, height);
      const step = [width / bitmap.width, height / bitmap.height];
      const x = (bitmap.width - 0.5 - crosshair[across]) * step[0];
      const y = (bitmap.height - 0.5 - crosshair[down]) * step[1];
      const gap = 6 * ratio + Math.max(...step) / 2; // the voxel itself stays visible
      context.shadowColor = "#000";
      context.shadowBlur = 3 * ratio;
      context.strokeStyle = "#78dcff";
      context.lineWidth = ratio;
      context.beginPath();
      for (const [ax, ay, bx, by] of [
        [0, y, x - gap, y],
        [x + gap, y, width, y],
        [x, 0, x, y - gap],
        [x, y + gap, x, height],
      ])
        if (ax <= bx && ay <= by) {
          context.moveTo(ax, ay);
          context.lineTo(bx, by);
        }
      context.stroke();
      const edge = 4 * ratio;
      context.font = `600 ${13 * ratio}px system-ui, sans-serif`;
      context.fillStyle = "#ffe9a8";
      context.strokeStyle = "#000"; // around the letters: the crosshair may run through them
      context.lineWidth = 5 * ratio;
      context.lineJoin = "round";
      const places = [
        ["left", "middle", edge, height / 2],
        ["right", "middle", width - edge, height / 2],
        ["center", "top", width / 2, edge],
        ["center", "bottom", width / 2, height - edge],
      ];
      places.forEach(([align, baseline, left, top], position) => {
        context.textAlign = align;
        context.textBaseline = baseline;
        context.strokeText(letters[position], left, top);
        context.fillText(letters[position], left, top);
      });
    }

    // --- In words ---

    function nameOf(code) {
      const name = shown.labels[code] || (code ? `label ${code}` : "background");
      const within = shown.regions
        .filter((area) => area.codes.includes(code) && area.name !== name)
        .map((area) => area.name);
      return within.length ? `${name} (${within.join(", ")})` : name;
    }

    function readOut() {
      const here = offset(...crosshair);
      const level = image[here];
      const { name: shows, unit, levels } = channel();
      let clipped = "\u2248 ";
      if (level === 1) clipped = "\u2264 ";
      else if (level === levels) clipped = "\u2265 ";
      const signed = (value, plus, minus) =>
        `${value < 0 ? minus : plus} ${Math.abs(value).toFixed(1)}`;
      const [x, y, z] = times(shown.to_mm, crosshair);
      const facts = [
        // pairs: a modality may be called "window" or "truth"
        ["voxel", times(shown.to_voxel, crosshair).map(Math.round).join(", ")],
        ["mm", `${signed(x, "R", "L")}, ${signed(y, "A", "P")}, ${signed(z, "S", "I")}`],
        [shows, level ? clipped + number(intensity(level)) + (unit && ` ${unit}`) : "0 (outside)"],
        ["window", greyWindow().map(number).join(" to ")],
      ];
      if (truth) facts.push(["truth", nameOf(truth[here])]);
      if (prediction) facts.push(["prediction", nameOf(prediction[here])]);
      find("facts").replaceChildren(
        ...facts.map(([name, value]) => {
          const pair = element("div", "");
          pair.append(element("dt", name), element("dd", value));
          return pair;
        }),
      );
      for (const { name, slider, title, canvas, through } of planes) {
        slider.value = crosshair[through];
        title.textContent = `${name} ${crosshair[through] + 1} / ${shown.shape[through]}`;
        canvas.setAttribute(
          "aria-label",
          `${title.textContent}, radiological: the patient's right is on the left`,
        );
      }
    }

    function legend() {
      const both = truth && prediction && errorOn.checked;
      let entries = [];
      if (both) {
        entries = [
          ["missed: truth only", ERRORS.missed],
          ["false: prediction only", ERRORS.false],
          ["both", ERRORS.both],
        ];
      } else if (truth || prediction) {
        entries = regions().map((area) => [area.name, area.colour]);
      }
      if (truth && shown.ignore !== null && (truthOn.checked || both))
        entries.push([
          `not annotated: ${nameOf(shown.ignore)}, ${number(100 * shown.ignored_share)} % of the voxels`,
          NOT_ANNOTATED,
        ]);
      const shows = entries.map(([name, colour]) => {
        const entry = element("span", name);
        const key = element("i", "");
        key.style.background = colour;
        entry.prepend(key);
        return entry;
      });
      if (truth && prediction && truthOn.checked && answerOn.checked && !both)
        shows.push(element("span", "truth: outline, prediction: filled"));
      find("legend").replaceChildren(...shows);
    }

    // --- What is chosen ---

    async function show() {
      const turn = ++asked;
      options(preset, ["as at first", ...Object.keys(channel().windows || {})]);
      // The same window for another channel, unless it has one of its own.
      if (preset.selectedIndex > 0 && !windows.has(channel())) setPreset();
      const chosen = shown.predictions[answer.selectedIndex];
      const ids = [channel().id, shown.truth, chosen && chosen.id];
      // Volumes of another case may have another shape.
      image = null;
      truth = null;
      prediction = null;
      try {
        const decoded = await Promise.all(ids.map((id) => (id ? volume(id) : null)));
        if (turn !== asked) return; // another choice was made meanwhile
        [image, truth, prediction] = decoded;
        find("failed").textContent = "";
        legend();
        draw();
      } catch (error) {
        if (turn === asked) fail(error);
      }
    }

    let waiting = false;
    function redraw() {
      if (waiting || !image) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        if (image) {
          legend();
          draw();
        }
      });
    }

    function options(select, names, values = names.keys()) {
      const before = select.selectedOptions[0] && select.selectedOptions[0].textContent;
      const places = [...values];
      select.replaceChildren(
        ...names.map((name, place) => element("option", name, { value: places[place] })),
      );
      // The same modality in the next case.
      select.selectedIndex = Math.max(0, names.indexOf(before));
      select.closest("label").hidden = names.length < 2;
    }

    function take(chosen) {
      shown = chosen;
      crosshair = shown.start.slice();
      [...list.children].forEach((button, place) =>
        button.setAttribute("aria-pressed", cases[place] === shown),
      );
      const namesOf = (choices) => choices.map((choice) => choice.name);
      options(modality, namesOf(shown.modalities));
      options(answer, namesOf(shown.predictions));
      const labelled = Boolean(shown.truth || shown.predictions.length);
      const several = labelled && shown.regions.length > 1;
      const areas = several ? namesOf(shown.regions) : [];
      options(region, ["all", ...areas], ["", ...shown.regions.keys()]);
      truthOn.closest("label").hidden = !shown.truth;
      answerOn.closest("label").hidden = !shown.predictions.length;
      errorOn.closest("label").hidden = !(shown.truth && shown.predictions.length);
      opacity.closest("label").hidden = !labelled;
      find("overlays").hidden = !labelled;
      const size = shown.shape.map((count, axis) => count * shown.spacing[axis]); // mm
      for (const { canvas, slider, across, down, through } of planes) {
        canvas.style.aspectRatio = `${size[across]} / ${size[down]}`;
        canvas.parentElement.style.setProperty("--mm", size[across]);
        slider.max = shown.shape[through] - 1;
        canvas.width = 1; // black until the case is decoded
      }
      find("facts").replaceChildren();
      find("unplaced").hidden = shown.placed;
      find("planes").style.gridTemplateColumns = planes
        .map((plane) => `${size[plane.across]}fr`)
        .join(" ");
      return show();
    }

    function move(axis, by) {
      crosshair[axis] = clamp(crosshair[axis] + by, 0, shown.shape[axis] - 1);
      redraw();
    }

    function cycle(select, by) {
      select.selectedIndex = (select.selectedIndex + by + select.length) % select.length;
      return show();
    }

    function setWindow(low, high) {
      windows.set(channel(), [low, high]);
      redraw();
    }

    function setPreset() {
      const chosen = preset.selectedIndex;
      if (chosen > 0) setWindow(...Object.values(channel().windows)[chosen - 1]);
      else resetWindow();
    }

    function hideOverlays() {
      if (Number(opacity.value)) {
        opacityBefore = opacity.value;
        opacity.value = 0;
      } else {
        opacity.value = opacityBefore;
      }
      redraw();
    }

    function setDrag(toWindow) {
      find("drag").setAttribute("aria-pressed", toWindow);
      root.classList.toggle("windowing", toWindow);
    }
    const dragsWindow = () => root.classList.contains("windowing");
    const resetWindow = () => {
      preset.selectedIndex = 0;
      windows.delete(channel());
      redraw();
    };
    const tick = (box) => {
      if (!box.closest("label").hidden) {
        box.checked = !box.checked;
        redraw();
      }
    };

    // --- Mouse, touch and keys ---

    function follow(plane) {
      const { canvas, across, down, through } = plane;
      let drag = null;
      const point = (event) => {
        const frame = canvas.getBoundingClientRect();
        const place = (share, axis) => {
          const last = shown.shape[axis] - 1;
          return clamp(last - Math.floor(share * shown.shape[axis]), 0, last);
        };
        crosshair[across] = place((event.clientX - frame.left) / frame.width, across);
        crosshair[down] = place((event.clientY - frame.top) / frame.height, down);
        redraw();
      };
      canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        const toWindow = event.button === 2 || event.shiftKey || dragsWindow();
        drag = toWindow ? { x: event.clientX, y: event.clientY, from: greyWindow() } : "crosshair";
        if (!toWindow) point(event);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!drag) return;
        if (drag === "crosshair") return point(event);
        const [low, high] = drag.from;
        const { low: least, high: most } = channel();
        const perPixel = (most - least) / 400;
        const level = (low + high) / 2 + (event.clientY - drag.y) * perPixel;
        const half = Math.max(
          (high - low) / 2 + ((event.clientX - drag.x) * perPixel) / 2,
          perPixel,
        );
        setWindow(level - half, level + half);
      });
      for (const end of ["pointerup", "pointercancel"])
        canvas.addEventListener(end, () => {
          drag = null;
        });
      canvas.addEventListener("contextmenu", (event) => event.preventDefault());
      canvas.addEventListener(
        "wheel",
        (event) => {
          event.preventDefault();
          if (event.deltaY) move(through, event.deltaY < 0 ? 1 : -1);
        },
        { passive: false },
      );
      canvas.addEventListener("keydown", (event) => {
        const steps = {
          ArrowLeft: [across, 1],
          ArrowRight: [across, -1],
          ArrowUp: [down, 1],
          ArrowDown: [down, -1],
          PageUp: [through, 1],
          PageDown: [through, -1],
        };
        if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        move(...steps[event.key]);
      });
      plane.slider.addEventListener("input", () => {
        crosshair[through] = Number(plane.slider.value);
        redraw();
      });
    }

    const keys = {
      m: () => cycle(modality, 1),
      M: () => cycle(modality, -1),
      r: () => cycle(region, 1),
      R: () => cycle(region, -1),
      n: () => cycle(answer, 1),
      N: () => cycle(answer, -1),
      o: hideOverlays,
      t: () => tick(truthOn),
      p: () => tick(answerOn),
      e: () => tick(errorOn),
      w: () => setDrag(!dragsWindow()),
      b: () => {
        preset.selectedIndex = (preset.selectedIndex + 1) % preset.length;
        setPreset();
      },
      0: resetWindow,
      h: () => {
        crosshair = shown.start.slice();
        redraw();
      },
      c: () => {
        if (cases.length > 1) take(cases[(cases.indexOf(shown) + 1) % cases.length]);
      },
    };

    document.addEventListener("keydown", (event) => {
      const typing = event.target.matches("select, input:not([type=range], [type=checkbox])");
      const ours = event.target === document.body || root.contains(event.target);
      if (!ours || typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key])
        return;
      event.preventDefault();
      keys[event.key]();
    });
    list.append(
      ...cases.map((choice) => {
        const button = element("button", "", { type: "button", onclick: () => take(choice) });
        if (choice.note) button.append(element("b", choice.note));
        button.append(element("span", choice.name), element("small", choice.scores));
        return button;
      }),
    );
    list.hidden = cases.length < 2 && !cases[0].scores;
    planes.forEach(follow);
    for (const select of [modality, region, answer]) select.addEventListener("change", show);
    for (const input of [truthOn, answerOn, errorOn, opacity])
      input.addEventListener("input", redraw);
    preset.addEventListener("change", setPreset);
    find("drag").addEventListener("click", () => setDrag(!dragsWindow()));
    find("reset").addEventListener("click", resetWindow);
    new ResizeObserver(redraw).observe(find("planes"));
    take(shown);
  }

  for (const root of document.querySelectorAll(".viewer")) {
    const fail = (error) => {
      root.querySelector("[data-is=failed]").textContent =
        `The slices cannot be shown: ${error.message || error}. ` +
        "A browser of 2023 or later is needed.";
      console.error(error);
    };
    try {
      start(root, fail);
    } catch (error) {
      fail(error);
    }
  }
})();
