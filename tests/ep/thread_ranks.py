# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks as threads of one process, and a log of what they sent each other."""

import threading

import torch
import torch.distributed as dist

from sgl_moe_jit.ep import balance, dispatch


class Group:
    """One rank's view of a group of threads."""

    def __init__(self, rank, world):
        self._rank, self.world = rank, world

    def rank(self):
        return self._rank

    def size(self):
        return self.world.ranks


class World:
    """The ranks, where they meet, and a log of every exchange: (rank, rows sent to each rank)."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.slots = [None] * ranks
        self.log = []

    def meet(self, rank, value, collective=""):
        """Give one value and return everybody's, when all have come to the same collective.

        Processes in different ones would wait; here that is an error at once, and for good.
        """
        self.slots[rank] = collective, value
        self.barrier.wait()
        everybody = list(self.slots)
        self.barrier.wait()
        if len({name for name, _ in everybody}) > 1:
            self.barrier.abort()
            raise AssertionError(f"in different collectives: {[name for name, _ in everybody]}")
        return [value for _, value in everybody]


class ThreadTransport:
    """Stands in for ``ep.transport.Transport``."""

    def __init__(self, group, through_host=False):
        self.group = group

    def check_device(self, device):
        pass

    def exchange(self, rows, send=None, receive=None):
        world, rank = self.group.world, self.group.rank()
        if send is None:
            assert rows.shape[0] % world.ranks == 0
            send = [rows.shape[0] // world.ranks] * world.ranks
        assert rows.dim() == 2 and sum(send) == rows.shape[0], (tuple(rows.shape), send)
        world.log.append((rank, tuple(send), rows.shape[1]))
        parts = world.meet(rank, rows.clone().split(list(send)), "exchange")
        got = [parts[source][rank] for source in range(world.ranks)]
        if receive is not None:
            assert [part.shape[0] for part in got] == list(receive)
        return torch.cat(got)

    def gather(self, rows):
        world, rank = self.group.world, self.group.rank()
        world.log.append((rank, (rows.shape[0],) * world.ranks, rows.shape[1]))
        collective = f"gather of {tuple(rows.shape)} {rows.dtype}"
        return torch.cat(world.meet(rank, rows.clone(), collective))


def let_balancers_meet(monkeypatch):
    """Have dynamic balancers take a ``Group`` of threads for a process group."""

    def all_reduce(x, group):
        group.world.log.append((group.rank(), "all_reduce", x.numel()))
        x.copy_(sum(group.world.meet(group.rank(), x.clone(), "all_reduce")))

    monkeypatch.setattr(balance, "Transport", ThreadTransport)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def run_ranks(monkeypatch, ranks, function):
    """Call ``function(group)`` on each rank; return results, errors by rank, and the world.

    Ranks that wait for one that raised have a ``BrokenBarrierError`` in the end.
    """
    monkeypatch.setattr(dispatch, "Transport", ThreadTransport)
    world = World(ranks)
    results, errors = [None] * ranks, [None] * ranks

    def target(rank):
        try:
            with torch.no_grad():
                results[rank] = function(Group(rank, world))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=target, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors, world


def all_ranks(monkeypatch, ranks, function):
    """Call ``function(group)`` on each rank; return results and the world, or raise."""
    results, errors, world = run_ranks(monkeypatch, ranks, function)
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert errors == [None] * ranks, errors
    return results, world
