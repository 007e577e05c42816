"""Allocations: the pages, slots and states that each running request holds, from admission to
release."""

from milepost.cache.allocation.admitting import Admitter
from milepost.cache.allocation.lending import Loan, Loans
from milepost.cache.allocation.running import Running
from milepost.cache.allocation.states import Allocation, State
from milepost.cache.allocation.windows import Windows

__all__ = ["Admitter", "Allocation", "Loan", "Loans", "Running", "State", "Windows"]
