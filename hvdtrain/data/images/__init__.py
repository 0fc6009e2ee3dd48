"""Images from files: IDX, npz and image folders."""
