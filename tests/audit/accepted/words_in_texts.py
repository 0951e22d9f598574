# import os; eval(x); obj.__class__
def _(p):
    '''__import__ {0.attr} os.system()'''
    return p['__typename']
