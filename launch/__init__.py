"""`python -m launch`: torch's elastic agent, with ranks forked from a preloaded server process.

The fork server has imported torch and the entry module (`trainer.__main__`). A forked rank calls
`main(argv) -> int` of that module, with SIGTERM, SIGINT, SIGHUP and SIGUSR1 blocked: the function
unblocks them once it has installed handlers. The rank gets torchrun's environment variables and:

- `TRAINER_LAUNCH=1`: the launcher knows the trainer's exit codes, so a rank simply exits with one.
- `TRAINER_LAUNCH_ID`: the same for all attempts of this launch.
- `TRAINER_LAUNCHER_FD`: this rank's socket to the launcher. End of file means that the launcher
  has died: the rank then has 4 seconds to save and exit. The rank writes lines of a keyword and a
  JSON value: `run "PATH"`, the run folder; `failure {…}`, the event of its failure; `returned`,
  before an exit code of the trainer itself. The launcher writes the keywords `lost`, `stale` and
  `absent`, which `trainer.resilience.launcher_channel.Orders` describes.
- `TRAINER_GRACE_S`: seconds that the survivors of a rank failure have to save and exit.
- `TRAINER_LAUNCH_PHASES`: after a restart, a JSON object with the start times of the launcher's
  phases, in seconds since the epoch: `stop` (an exit, or a change of the set of nodes, was
  noticed), `rendezvous` (all ranks had exited) and `fork`.

The entry module may define `preload(argv) -> int`, which imports what a run with these arguments
needs. If there is nothing to start, it returns the exit code, or raises SystemExit. It must not
start threads, touch a CUDA device or compute with tensors: neither a CUDA context nor a thread
pool survives a fork.
"""
