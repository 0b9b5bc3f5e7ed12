"""Nothing is drawn."""


def __getattr__(name):
    return lambda *args, **named: None
