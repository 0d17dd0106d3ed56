"""The HiCache backend's parts: SGLang's host pools and the store behind them."""
