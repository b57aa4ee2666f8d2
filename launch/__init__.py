"""`python -m launch`: torch's elastic agent whose ranks are forked from a process that is warm.

A rank is started by calling `main(argv) -> int` of the entry module (`trainer.__main__`) in a
process forked from the fork server, which has imported it and torch before. SIGTERM, SIGINT, SIGHUP
and SIGUSR1 are blocked then: it unblocks them when it handles them. The rank sees torchrun's
environment and five more variables:

- `TRAINER_LAUNCH=1`: the launcher knows the trainer's exit codes; a rank just exits with them.
- `TRAINER_LAUNCH_ID`: equal for all attempts of this launcher's life, and for no other launcher.
- `TRAINER_LAUNCHER_FD`: a socket to the launcher, of this rank alone. It comes to its
  end of file when the launcher has died: the rank then has 4 seconds to save and leave before it is
  killed. A rank may write lines to it, a word and a JSON value each: `run "PATH"`, the run folder's
  absolute path, from which the launcher reads how far the run has come (see `launch.progress`);
  `failure {…}`, the event with which it fails (see `launch.verdict`); `returned`, before it ends
  with an exit code that the launcher is to take for the trainer's own. The launcher may write words
  to it: `lost` where a node is gone (the rank leaves as if a peer had died), `stale` where a newer
  attempt has begun without this node (it leaves without saving), `absent` where a rank has failed
  (one that has not met all others yet leaves).
- `TRAINER_GRACE_S`: after a rank has died, what the others have to save and leave (`--grace-s`).
- `TRAINER_LAUNCH_PHASES`: of a restart, what the launcher did and when it began, as JSON: `stop`
  (the first end was noticed, or a node's coming or going), `rendezvous` (all ranks had ended) and
  `fork`, in seconds since the epoch.

The entry module may define `preload(argv) -> int`, called once in the fork server: it imports what
a run with these arguments needs, and may find that there is nothing to start: then it says why on
stderr and returns the exit code, or raises SystemExit (0 after `--help`). It must start no thread,
touch no CUDA device and compute nothing with tensors, as neither a CUDA context nor a pool of
threads survives a fork. Without `preload`, the entry module and torch are imported.
"""
