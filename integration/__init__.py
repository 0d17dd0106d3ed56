"""Adapters to inference engines, installed as tutti.integration."""
