def _(p):
    date = p['date']
    json = date + 1
    function = json
    function.x = date
    return function
