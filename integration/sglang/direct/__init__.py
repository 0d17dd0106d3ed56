"""The linker's parts: SGLang's KV pages to SSD and back without a host cache tier."""
