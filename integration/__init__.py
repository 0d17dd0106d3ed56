"""Adapters to inference servers, installed as tutti.integration."""
