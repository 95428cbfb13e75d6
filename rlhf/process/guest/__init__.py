"""Code that is not this project's, in a process of its own.

Whatever it does there, the process that asks for it is as without it: generators, working folder, modules, environment,
signals, settings of torch, memory, threads and forked children are the guest's own.
"""
