"""What a model writes in a conversation, split into thoughts, content and calls of tools."""
