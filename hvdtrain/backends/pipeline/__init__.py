"""Split models: what both frameworks share of a pipeline of stages.

A model is a sequence of blocks, and a stage is some consecutive ones of them on one worker. As many workers
as there are stages make up a replica of the model, and the replicas train data-parallel. Activations and
their gradients pass between the stages of a replica by mpi4py; the gradients of a stage are summed over its
replicas by Horovod.
"""
