def _(p):
    import json
    try:
        return json.loads(p)
    except json.JSONDecodeError as error:
        return error.msg
