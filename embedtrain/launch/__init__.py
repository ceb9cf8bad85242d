"""Handing a training to a scheduler, and finding out what one has started; imports no torch."""
