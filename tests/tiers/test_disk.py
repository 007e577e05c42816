"""What reads and writes of files tell, whenever somebody looks."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from milepost.tiers import device_copies as mover_module
from milepost.tiers import disk as disk_module
from milepost.tiers.arena import Arena, ItemTensors
from milepost.tiers.device_copies import DirectLink, Passed
from milepost.tiers.disk import Reads
from milepost.tiers.threads import Threads


class Clock:
    def __init__(self, *times_s):
        self.times_s = list(times_s)

    def perf_counter(self):
        return self.times_s.pop(0)


def test_a_read_takes_until_its_last_file_is_there_not_until_a_step_is_over(monkeypatch):
    """Else the disk is found slow where steps are long, and nothing is loaded from it any more."""
    monkeypatch.setattr(disk_module, "time", Clock(1.25, 1.5))
    one, other = Future(), Future()
    reads = Reads([(SimpleNamespace(), [one]), (SimpleNamespace(), [other])], begun_s=1.0)
    assert not reads.is_over
    other.set_result(True)
    one.set_result(True)
    assert reads.is_over
    assert reads.ended_s - reads.begun_s == 0.5


def test_a_copy_takes_its_own_time_not_that_of_the_files_before_it(monkeypatch):
    memory = Arena(
        pages=ItemTensors(tensors=(torch.zeros(4, 64),)),
        states=ItemTensors(tensors=(torch.zeros(2, 256),)),
    )
    monkeypatch.setattr(mover_module, "time", Clock(7.0, 7.25))
    copies = [(memory, memory, ("page", 0, 1, 1, ()))]
    done = DirectLink().copy_behind(Passed(), copies, up=True)
    assert done.seconds() == 0.25


def test_work_for_which_there_is_no_thread_is_cancelled_and_later_work_is_done(monkeypatch):
    threads = Threads(2, "reads")
    with monkeypatch.context() as patch:

        def fail(_):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        assert threads.submit(int).cancelled()
    assert threads.submit(int, "7").result(10) == 7
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert threads.submit(int, "8").result(10) == 8, "by the one that there is"
    threads.close()
