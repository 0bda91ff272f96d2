"""Workers as threads of one process, whose exchange is a barrier and an addition."""

import threading

import numpy as np
import tensorflow as tf

from cpu3d.distributed.all_reduce import Exchange


class ThreadExchange(Exchange):
    """The exchange of one of several workers; all of them put their vectors into `table`."""

    def __init__(self, rank, table, barrier, turn):
        self.rank = rank
        self.count = len(table)
        self._table = table
        self._barrier = barrier
        self._turn = turn

    def sum(self, vector):
        self._table[self.rank] = np.asarray(vector)
        self._wait()
        total = sum(self._table[1:], self._table[0])
        self._wait()
        return tf.constant(total)

    def _wait(self):
        self._turn.release()
        try:
            self._barrier.wait(60)
        finally:
            self._turn.acquire()


def together(count, work):
    """The results, or errors, of `work` as each of `count` workers at once."""
    table = [None] * count
    barrier = threading.Barrier(count)
    answers = [None] * count
    # one of them computes at a time: Keras does not build two networks at once
    turn = threading.Lock()

    def of_rank(rank):
        with turn:
            try:
                answers[rank] = work(ThreadExchange(rank, table, barrier, turn))
            except Exception as error:
                answers[rank] = error  # who waits for it gives up after a minute

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers
