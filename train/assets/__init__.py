"""The embedded tiny base model: its tokenizer, its configuration, how it was made and how it is measured."""
