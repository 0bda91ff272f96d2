"""Random patches through MONAI's data sets. Run by a Python that has MONAI; imports nothing of this project.

python monai_peer.py '{"kind": "cache", "pairs": [["image.nii.gz", "label.nii.gz"], ...], "patch": [96, 96, 96], ...}'

Prints one JSON line: seconds a sample in each epoch, seconds to fill the cache, memory.
"""

import json
import sys
import time


def main():
    import monai
    import torch
    from monai.data import CacheDataset, Dataset, PersistentDataset
    from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandSpatialCropd

    request = json.loads(sys.argv[1])
    keys = ["image", "label"]
    transform = Compose(
        [
            LoadImaged(keys, image_only=True),
            EnsureChannelFirstd(keys),
            RandSpatialCropd(keys, roi_size=request["patch"], random_size=False),
        ]
    )
    items = [dict(zip(keys, pair)) for pair in request["pairs"]]
    begin = time.perf_counter()
    if request["kind"] == "cache":
        dataset = CacheDataset(items, transform, progress=False)
    elif request["kind"] == "persistent":
        dataset = PersistentDataset(items, transform, cache_dir=request["cache_dir"])
    else:
        dataset = Dataset(items, transform)
    monai.utils.set_determinism(0)
    _epoch(torch, dataset)  # what a first pass fills is not a sample's time
    fill_s = time.perf_counter() - begin
    sample_s = [_epoch(torch, dataset) for _ in range(request["epochs"])]
    status = _status()
    print(
        json.dumps(
            {
                "sample_s": sample_s,
                "fill_s": fill_s,
                "anonymous_bytes": status.get("RssAnon", 0),
                "peak_bytes": status.get("VmHWM", 0),
                "versions": {"monai": monai.__version__, "torch": torch.__version__},
            }
        )
    )


def _epoch(torch, dataset):
    """Seconds a sample of one pass; each ends as contiguous tensors of which every page was touched."""
    begin = time.perf_counter()
    for index in range(len(dataset)):
        item = dataset[index]
        for part in item.values():
            tensor = part.as_tensor().to(torch.float32).contiguous()
            float(tensor.reshape(-1)[::1024].sum())
    return (time.perf_counter() - begin) / len(dataset)


def _status():
    """The sizes in /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="utf-8") as file:
        pairs = [line.split() for line in file if line.endswith(" kB\n")]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}


if __name__ == "__main__":
    main()
