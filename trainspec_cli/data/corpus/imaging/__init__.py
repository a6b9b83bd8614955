"""Samples of images and volumes: images by class, labelled volumes, and synthetic phantoms."""
