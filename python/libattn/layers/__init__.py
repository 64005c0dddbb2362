"""Layers beside attention: see libattn.layers.rotary."""
