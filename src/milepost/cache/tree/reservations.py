"""Which checkpoints waiting requests will resume from.

A waiting request is a return that is known before it happens, so what it needs is worth more than
anything that may or may not be asked for. Its reservation hangs on that checkpoint, and passes to
the next shallower one when it is evicted.
"""

from __future__ import annotations

from milepost.cache.order import Order
from milepost.cache.tree.nodes import NO_RESERVATIONS, Checkpoint, Reservation


def hang(reservation: Reservation, checkpoint: Checkpoint | None) -> None:
    """Put a reservation that hangs nowhere on a checkpoint."""
    reservation.checkpoint = checkpoint
    if checkpoint is None:
        return
    if checkpoint.reservations is NO_RESERVATIONS:
        checkpoint.reservations = Order()
    checkpoint.reservations.push(reservation, reservation.due)


def take(reservation: Reservation) -> Checkpoint | None:
    """Take a reservation off its checkpoint, and return that."""
    checkpoint = reservation.checkpoint
    if checkpoint is not None:
        checkpoint.reservations.discard(reservation)
        reservation.checkpoint = None
    return checkpoint


def pass_on(checkpoint: Checkpoint) -> None:
    """Hand the reservations of a checkpoint that is about to go to the next shallower one."""
    reservations, checkpoint.reservations = checkpoint.reservations, NO_RESERVATIONS
    for reservation in reservations:
        hang(reservation, checkpoint.above)
