"""Messages to tokens: what a chat is, how a checkpoint writes it down, its token ids, and a chat on disk."""

from openk3.chat.messages import ROLES, Message, validate_messages, validate_tools
from openk3.chat.template import ChatTemplate
from openk3.chat.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatTemplate", "Message", "Tokenizer", "validate_messages", "validate_tools"]
