"""The default pipeline: a question in text or speech, the answer in text and speech."""
