"""Images from files: IDX, CIFAR-10 binary batches, npz and image folders."""
