"""One model on several processes (ranks), each with its own share of weights and K/V cache.

parallel.py (beside this package)  how many ranks share each layer, how many stages there are, and who has what
communicator.py    what ranks can do with each other: all-reduce, send, receive, broadcast; all of it counted
mpi.py, nccl.py    between processes and hosts, and between GPUs
threads.py         between threads of one process, for tests and to try things
messages.py        what rank 0 tells the others
ranks.py           a rank's place, and the agreement of all: models, versions, failures
micro_batches.py   parts of a pass, on which stages work at the same time
runner.py          a rank's part of a forward pass; rank 0 leads, the others follow
logits.py          logits spread over the ranks; the choice of tokens from them

Rank 0 takes the requests, and alone has scheduler, strategies and the books of the cache. Before each forward pass it
tells the others the batch, which names the pages; they compute their part on pages of the same numbers. So nothing is
decided twice, and layers know no more of it than `reduce`.
"""
