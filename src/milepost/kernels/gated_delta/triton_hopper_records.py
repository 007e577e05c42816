"""What Hopper's verify kernel reads of a sequence's tokens, and what it leaves of them.

`stream` are (token, projected_stride, recorded, record_stride, read, num_folded, num_places): the
step's tokens of the sequence, its records, its convolution state, and how many tokens there are,
first the recorded ones that are folded, then the step's own. A place counts both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_taps(weight, head, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """[SIZE, BLOCK_TAPS], the weights of a head's convolution."""
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    return gl.load(weight + channel * TAPS + tap, mask=tap < TAPS, other=0.0)


@gluon.jit
def load_window(stream, head, place, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """[SIZE, BLOCK_TAPS], a head's inputs up to a place, oldest first: of the state, of records, of
    the step's tokens."""
    token, projected_stride, recorded, record_stride, read, num_folded, num_places = stream
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    source = place - (TAPS - 1) + tap
    is_new = (source >= num_folded) & (source < num_places) & (tap < TAPS)
    is_folded = (source >= 0) & (source < num_folded) & (tap < TAPS)
    at = token + (source - num_folded) * projected_stride + channel
    new = gl.load(at, mask=is_new, other=0.0)
    folded = gl.load(recorded + source * record_stride + channel, mask=is_folded, other=0.0)
    at = read + channel * (TAPS - 1) + (TAPS - 1) + source
    is_old = (source < 0) & (source > -TAPS) & (tap < TAPS)
    old = gl.load(at, mask=is_old, other=0.0)
    return gl.where(is_new, new, gl.where(is_folded, folded, old.to(new.dtype)))


@gluon.jit
def load_strengths(stream, gates, kept_gates, place, VALUE_HEADS: gl.constexpr):
    """What a head's beta and decay at a place are made of."""
    _token, projected_stride, _recorded, record_stride, _read, num_folded, num_places = stream
    is_new = (place >= num_folded) & (place < num_places)
    at, kept_at = (
        gates + (place - num_folded) * projected_stride,
        kept_gates + place * record_stride,
    )
    b = gl.load(at, mask=is_new, other=0.0)
    a = gl.load(at + VALUE_HEADS, mask=is_new, other=0.0)
    is_folded = place < num_folded
    kept_b = gl.load(kept_at, mask=is_folded, other=0.0)
    kept_a = gl.load(kept_at + VALUE_HEADS, mask=is_folded, other=0.0)
    return gl.where(is_new, b, kept_b), gl.where(is_new, a, kept_a)


@gluon.jit
def keep_inputs(stream, head, target, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """Move a head's convolution state on to a place, and record the drafts' inputs. `target` are
    the state that is written, the place, the step's tokens, and whether there is a sequence."""
    kept, last, num_new, is_real = target
    token, projected_stride, recorded, record_stride, _read, _num_folded, _num = stream
    window = load_window(stream, head, last, SIZE, TAPS, WINDOW)
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    at = kept + channel[:, None] * (TAPS - 1) + tap - 1
    gl.store(at, window.to(kept.dtype.element_ty), mask=is_real & (tap > 0) & (tap < TAPS))
    for draft in range(num_new - 1):
        inputs = gl.load(token + (draft + 1) * projected_stride + channel)
        gl.store(recorded + draft * record_stride + channel, inputs)


@gluon.jit
def record_strengths(stream, gates, kept_gates, num_new, VALUE_HEADS: gl.constexpr):
    """Keep what the drafts' betas and decays are made of."""
    projected_stride, record_stride = stream[1], stream[3]
    for draft in range(num_new - 1):
        source, at = gates + (draft + 1) * projected_stride, kept_gates + draft * record_stride
        gl.store(at, gl.load(source))
        gl.store(at + VALUE_HEADS, gl.load(source + VALUE_HEADS))
