"""`python -m elastic_agent.torch.check train.py`: tries whether a script can train elastically.

    __main__: which runs, and in what order ──▶ runs: agents on this machine, and what happens to them
                                                   │ each worker
                                                   ▼
    report: the answer ◀── findings ◀── compare ◀── probe: a session that notes what it does; outside: what else changes
"""
