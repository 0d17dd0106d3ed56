"""SGLang: a HiCache storage backend and a GPU-direct linker; translation only, no I/O."""
