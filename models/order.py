"""The forward and backward pass of a U-Net: the order of its operations, and the inputs of each. No
TensorFlow.

models/step.py computes it, and the memory estimator writes it down
(memory_estimator/step/training_step.py).

A convolution keeps nothing but its raw sum: norm and ReLU are formed wherever it is read. Under
"speed" every raw sum is kept. Under "lean" these are made again when the backward pass reads them:
the finest level's encoder, the first sum of the others, and all up-sampled maps, which come in
parts no wider than the skip."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from models.config import UNetConfig


class Block(NamedTuple):
    """Maps that the convolutions of a level's block read and make."""

    entry: List[Any]  # one map, or the skip's and the parts of the up-sampled one
    first: Any
    second: Any
    output: Any  # `second`, but with a residual's sum a map of its own


class Order:
    """One pass. A subclass has the operations, and the types of a map and of its gradient.

    `name` is a layer's and `again` true if the map was made before. `entry` are the maps that a
    block reads, and `part` is the place of one of them; a kernel of joined maps has a part for
    each. `at` is a gradient of a map's values, or of its raw sum if `of_raw` or `to_raw` has made
    it.

        max_pool(level, source)                      to `level`
        max_pool_gradient(level, source, at, add)    from below `level`, plus `add`
        convolve(name, entry, again)
        convolve_part(name, entry, part, add, last)  its last part, plus `add`; the `last` of all has the norm
        up(level, below, part, again)
        up_gradients(level, below, part, at)         of the filters, and of `below`
        join_up_gradients(level, parts)              of the filters
        add_gradients(at, add)                       of one map
        project(name, entry, part, add)              a head, or a part of a shortcut, plus `add`
        project_gradient(name, entry, part, at, add) of the kernel's part too; returns that of the
        map, plus `add`
        project_to_raw(source, at)                   of the finest head: the same, but of the raw sum of `source`
        residual_sum(name, second, total, again)
        residual_gradient(name, block, at)
        of_raw(name, source, at)                     through the norm and ReLU of a convolution's sum; takes no memory
        to_raw(name, source, at)                     a map of that, over the raw sum
        input_gradient(name, at, entry, part, sums)  `sums`: the norm of the map needs those of its gradient
        filter_gradient(name, entry, at, part)       `part` names the part of a kernel, "" is the whole
        split_kernel(name, entry)                    of joined maps: a copy of the rows of each
        join_gradients(name, parts)                  of a kernel of joined maps
    """

    def __init__(self, unet: UNetConfig):
        self.unet, self.makes_again = unet, unet.policy == "lean"
        self._encoders: List[Block] = []
        self._decoders: Dict[int, Block] = {}

    def forward(self, image: Any) -> List[Any]:
        """Logits of each head, the finest first."""
        entry = image
        for level in range(self.unet.depth):
            if level:
                entry = self.max_pool(level, self._encoders[-1].output)
            self._encoders.append(self._block(f"encoder{level}", [entry]))
        for level in reversed(range(self.unet.depth - 1)):
            self._decoders[level] = self._decoder(level)
        return [
            self.project(head_of(level), [self._decoders[level].output], 0, None)
            for level in self._heads()
        ]

    def backward(self, slopes: Sequence[Any]) -> None:
        """All gradients, from those of the logits of each head."""
        by_level, depth = dict(zip(self._heads(), slopes)), self.unet.depth
        at_skips, at = {}, None
        for level in range(depth - 1):
            if level in by_level:
                at = self._through_head(level, by_level[level], at)
            at_skips[level], at = self._through_decoder(level, at)
        for level in reversed(range(depth)):
            name, block = f"encoder{level}", self._encoders[level]
            if level < depth - 1:
                block = self._block_again(level)
                at = self.max_pool_gradient(level, block.output, at, at_skips.pop(level))
            at_first, at_sum = self._through_block(name, block, at)
            self.filter_gradient(f"{name}_conv1", block.entry, at_first)
            if level:
                at = self._at_entry(name, block.entry, 0, at_first, at_sum)
                continue
            at_shortcut = None
            if at_sum is not None:
                shortcut = f"{name}_shortcut"
                at_shortcut = self.project_gradient(shortcut, block.entry, 0, at_sum, None)
            self._before_image = (at_first, at_shortcut)

    def image_gradient(self) -> Any:
        """The gradient of the image's values, after `backward`. Training does not ask for it."""
        at_first, at_shortcut = self._before_image
        at_image = self.input_gradient("encoder0_conv1", at_first, self._encoders[0].entry, 0)
        if at_shortcut is None:
            return at_image
        return self.add_gradients(at_image, at_shortcut)

    def _heads(self) -> List[int]:
        """Levels with a head, as the network's outputs are ordered."""
        return [0, *range(self.unet.depth - 2, 0, -1)] if self.unet.deep_supervision else [0]

    def _below(self, level: int) -> Any:
        """The map that decoder `level` samples up."""
        return (
            self._decoders[level + 1] if level + 1 in self._decoders else self._encoders[-1]
        ).output

    def _decoder(self, level: int) -> Block:
        name, ups, total = f"decoder{level}", len(self.unet.up_parts(level)), None
        entry = [self._encoders[level].output]
        if ups == 1:
            return self._block(name, [*entry, self.up(level, self._below(level), 0, False)])
        for part in range(1 + ups):  # added up in the memory of the skip
            if part:
                entry.append(self.up(level, self._below(level), part - 1, False))
            total = self.convolve_part(f"{name}_conv1", entry, part, total, part == ups)
        return self._block(name, entry, first=total)

    def _block(
        self, name: str, entry: List[Any], again: bool = False, first: Optional[Any] = None
    ) -> Block:
        first = first or self.convolve(f"{name}_conv1", entry, again)
        second = self.convolve(f"{name}_conv2", [first], again)
        if not self.unet.residual:
            return Block(entry, first, second, second)
        total = None
        for part in range(len(entry)):
            total = self.project(f"{name}_shortcut", entry, part, total)
        return Block(entry, first, second, self.residual_sum(name, second, total, again))

    def _block_again(self, level: int) -> Block:
        """An encoder's block whose sums a gradient reads."""
        block, name = self._encoders[level], f"encoder{level}"
        if not self.makes_again:
            return block
        if not level:
            return self._block(name, block.entry, again=True)
        return block._replace(first=self.convolve(f"{name}_conv1", block.entry, True))

    def _through_head(self, level: int, slope: Any, at: Optional[Any]) -> Any:
        source = self._decoders[level].output
        if at is None and not self.unet.residual:  # memory is at its peak: over the raw map itself
            return self.project_to_raw(source, slope)
        return self.project_gradient(head_of(level), [source], 0, slope, at)

    def _through_decoder(self, level: int, at: Any) -> Tuple[Any, Any]:
        """Gradients of the values of the skip and of the level below."""
        name, block, below = f"decoder{level}", self._decoders[level], self._below(level)
        at_first, at_sum = self._through_block(name, block, at)
        if self.makes_again:
            return self._through_parts(
                level, self.to_raw(f"{name}_conv1", block.first, at_first), at_sum
            )
        self.split_kernel(
            f"{name}_conv1", block.entry
        )  # not into the memory that the next map leaves
        self.filter_gradient(f"{name}_conv1", block.entry, at_first)
        at_up = self._at_entry(name, block.entry, 1, at_first, at_sum)
        at_skip = self._at_entry(
            name, block.entry, 0, at_first, at_sum
        )  # now, as the block's last maps go with it
        of_up, at_below = self.up_gradients(level, below, 0, at_up)
        self.join_up_gradients(level, [of_up])
        return at_skip, at_below

    def _through_parts(self, level: int, at_first: Any, at_sum: Any) -> Tuple[Any, Any]:
        """`_through_decoder` if the block's maps are made again, a part of the up-sampled map at a
        time."""
        name, below, at_below, of_ups = f"decoder{level}", self._below(level), None, []
        entry = [self._encoders[level].output if level else self._block_again(level).output]
        of_parts = [self.filter_gradient(f"{name}_conv1", entry, at_first, "/skip")]
        for part in range(len(self.unet.up_parts(level))):
            entry.append(self.up(level, below, part, True))
            of_parts.append(
                self.filter_gradient(f"{name}_conv1", entry[-1:], at_first, f"/up{part}")
            )
            at_up = self._at_entry(name, entry, part + 1, at_first, at_sum)
            of_up, at_part = self.up_gradients(level, below, part, at_up)
            of_ups.append(of_up)
            at_below = self.add_gradients(at_part, at_below) if at_below else at_part
        self.join_gradients(f"{name}_conv1", of_parts)
        self.join_up_gradients(level, of_ups)
        return self._at_entry(name, entry, 0, at_first, at_sum), at_below

    def _through_block(self, name: str, block: Block, at: Any) -> Tuple[Any, Any]:
        """Gradients of the first convolution's raw sum, and of the residual's sum, which is None
        without."""
        at_sum = None
        if self.unet.residual:
            at = at_sum = self.residual_gradient(name, block, at)
        at_second = self.of_raw(f"{name}_conv2", block.second, at)
        self.filter_gradient(f"{name}_conv2", [block.first], at_second)
        at_values = self.input_gradient(f"{name}_conv2", at_second, [block.first], 0, sums=True)
        return self.of_raw(f"{name}_conv1", block.first, at_values), at_sum

    def _at_entry(
        self, name: str, entry: List[Any], part: int, at_first: Any, at_sum: Optional[Any]
    ) -> Any:
        """The gradient of the values of a part of a block's entry."""
        at_values = self.input_gradient(f"{name}_conv1", at_first, entry, part)
        if at_sum is None:
            return at_values
        return self.project_gradient(f"{name}_shortcut", entry, part, at_sum, at_values)


def head_of(level: int) -> str:
    return f"head{level}" if level else "head"
