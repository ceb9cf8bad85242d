"""The commands of embedtrain."""
