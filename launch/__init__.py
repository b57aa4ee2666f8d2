"""`python -m launch`: torch's elastic agent, with ranks forked from a preloaded server process.

To start a rank, the fork server, which has already imported torch and the entry module
(`trainer.__main__`), forks a process that calls `main(argv) -> int` of that module. In the new
process SIGTERM, SIGINT, SIGHUP and SIGUSR1 are blocked: the entry function unblocks them once it
has installed handlers. The rank gets torchrun's environment variables and five more:

- `TRAINER_LAUNCH=1`: the launcher knows the trainer's exit codes, so a rank simply exits with one.
- `TRAINER_LAUNCH_ID`: identifies this launch; the same for all of its attempts.
- `TRAINER_LAUNCHER_FD`: this rank's socket to the launcher. End of file means that the launcher
  has died: the rank then has 4 seconds to save and exit before it is killed.
  The rank may write lines of a keyword and a JSON value:
  `run "PATH"`, the absolute path of the run folder, from which the launcher reads the progress of
  the run (`launch.progress`); `failure {…}`, the event that describes its failure
  (`launch.exit_policy`); and `returned` without a value, before an exit code of the trainer itself.
  The launcher may write keywords: `lost`, a node is gone (the rank exits as after a peer's death);
  `stale`, a newer attempt has begun without this node (the rank exits without saving); `absent`, a
  rank has failed (a rank that is still waiting for its peers to join exits).
- `TRAINER_GRACE_S`: seconds that the survivors of a rank failure have to save and exit
  (`--grace-s`).
- `TRAINER_LAUNCH_PHASES`: after a restart, a JSON object with the start times of the launcher's
  phases, in seconds since the epoch: `stop` (the first rank exit, or a change of the set of nodes,
  was noticed), `rendezvous` (all ranks had exited) and `fork`.

The entry module may define `preload(argv) -> int`, which the fork server calls once. It imports
what a run with these arguments needs. If there is nothing to start, it prints the reason on stderr
and returns the exit code, or raises SystemExit (0 after `--help`). It must not start threads, touch
a CUDA device or compute with tensors: neither a CUDA context nor a thread pool survives a fork.
Without `preload`, the server imports only the entry module and torch.
"""
