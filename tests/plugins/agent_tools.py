"""Tools of users."""


def calc(expression: str) -> str:
    """Works an arithmetic expression out.

    Args:
        expression: Numbers with + - * /.
    """
    return f"got {expression}"
