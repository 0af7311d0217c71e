//! The words of `--help`.

use super::dialect::Dialect;

pub(super) const ABOUT: &str = "\
Runs on each node of an elastic training job: joins rounds with the other nodes, starts this node's workers with \
their ranks, and starts them again when workers fail or nodes come and go. Takes torchrun's flags and sets its \
environment, so PyTorch scripts run unchanged.

Each flag may be written with dashes or underscores, be shortened while it stays unique, and be set by a variable: \
--rdzv-id by PET_RDZV_ID; switches by 0 or 1. The command line wins. All that follows PROGRAM belongs to it.";

/// The text that holds for this dialect alone.
pub(super) fn before(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Own => "",
        Dialect::Torchrun => "With torchrun's defaults and exit codes.",
        Dialect::Launch => {
            "With the defaults and exit codes of python -m torch.distributed.launch: each worker is given --local-rank=N \
             before its arguments, unless --use-env is given."
        }
        Dialect::Torchelastic => {
            "With the defaults of python -m torchelastic.distributed.launch 0.2.2: --nproc-per-node=auto, \
             --rdzv-backend=etcd, --max-restarts=3."
        }
    }
}

pub(super) const EXAMPLES: &str = "\
Examples:
  One machine, two workers, no store:
    elastic-agent --standalone --nproc-per-node=2 train.py --epochs 10

  One to four machines, coordinated by etcd; the same command on each:
    elastic-agent --rdzv-backend=etcd --rdzv-endpoint=etcd0:2379,etcd1:2379 \\
        --rdzv-id=JOB --nnodes=1:4 --nproc-per-node=gpu --max-restarts=3 train.py

  Two machines without etcd: the agent on node0 serves the store:
    elastic-agent --rdzv-backend=c10d --rdzv-endpoint=node0 --rdzv-id=JOB --nnodes=2 train.py

  A program that is not Python, its output shown and kept:
    elastic-agent --standalone --no-python --tee=3 --log-dir=logs ./train --rank '${rank}'

Arguments may hold ${local_rank} and ${rank}; $$ stands for a dollar.

In place of torchrun, which launch scripts then need not know:
  elastic-agent torchrun-compat ...        as torchrun; or a link of that name
  elastic-agent launch-compat ...          as python -m torch.distributed.launch
  elastic-agent torchelastic-compat ...    as python -m torchelastic.distributed.launch (0.2.2)
A program of such a name is run by ./NAME, or after a flag or --.

Exit codes: 0 the job succeeded, 1 this node could not take part or its store was lost, 2 the command line is wrong, \
3 this node left as planned (a signal, or its operator), 4 the operator closed the job, 5 the job failed.";

pub(super) const NNODES: &str = "Number of nodes, or the fewest and the most that train together [default: 1]";
pub(super) const NPROC: &str = "Workers on this node: a number; one for each visible NVIDIA GPU (gpu), each CPU that \
     affinity and cgroup allow (cpu), or each Intel GPU (xpu); gpu if there are any and else cpu (auto) [default: 1]";
pub(super) const NODE_NAME: &str = "This node's name; one agent at a time can have it [default: the host's name, with \
     -2, -3, … for further agents on it]";
pub(super) const ROLE: &str = "What this node's workers are, for ROLE_NAME, role ranks and log prefixes \
     [default: default]";
pub(super) const NUMA_BINDING: &str = "Bind each worker to CPUs near its GPU, the one whose place among the visible ones \
     is the worker's local rank: to its NUMA node (node), all nodes of its socket (socket), its share of the node's \
     cores (exclusive), or cores that share a last-level cache (core-complex)";
pub(super) const VIRTUAL_LOCAL_RANK: &str = "Each worker sees its own GPU alone, as device 0: LOCAL_RANK is 0 and \
     CUDA_VISIBLE_DEVICES names one";
pub(super) const BACKEND: &str = "What nodes meet through: etcd (v3 API); etcd-v2, \
     torchrun's own `etcd` rendezvous on the v2 API, together with torchrun nodes; c10d, a small store served by the agent \
     that the endpoint names; or static, that store on --master-addr and ranks by --node-rank [default: static, and \
     one node that is told no address needs none of it]";
pub(super) const NODE_RANK: &str = "This node's place among the nodes, from 0; static only [default: 0]";
pub(super) const MASTER_ADDR: &str = "Name or address of the node of rank 0; static only [default: 127.0.0.1]";
pub(super) const MASTER_PORT: &str = "Port on which node 0's agent serves the store; static only. The workers' \
     MASTER_PORT is a fresh one in every round [default: 29500]";
pub(super) const ENDPOINT: &str = "Where the store is; for etcd several with commas. Default ports: etcd 2379, c10d \
     29400 [default: localhost]";
pub(super) const ID: &str = "The job. Agents with the same id train together: letters, digits and ._-:@+= \
     [default: none, as with torchrun]";
pub(super) const CONF: &str = "Details: join_timeout (or timeout), last_call_timeout, lease_ttl, margin, \
    min_round_time, takeover_delay, start_timeout, stop_grace, drain_grace, quiesce_timeout (times such as 30, 500ms, \
    10m); on_store_loss; prefix; api=v3|v2 (etcd); protocol=http|https, cacert, cert, key; user, password_file; \
    is_host (c10d); \
     workers_store=agent|workers, workers_store_memory (256MiB)";
pub(super) const STANDALONE: &str = "One node and nothing else: no store to set up, a fresh job each time";
pub(super) const LOCAL_ADDR: &str = "Name or address at which other nodes reach this one [default: the address of \
     the interface that leads to the store]";
pub(super) const PEER_PORT: &str = "Port on which other agents reach this one [default: a free one]";
pub(super) const PIN_INTERFACE: &str = "Have gloo and NCCL use only the network interface whose address other nodes are \
     told (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)";
pub(super) const MAX_RESTARTS: &str = "How many failures the job forgives, counted for all nodes together \
     [default: 0]";
pub(super) const RESTART_POLICY: &str = "What uses up --max-restarts: failures alone, or all changes, nodes that come \
     and go too [default: failures]";
pub(super) const ON_STORE_LOSS: &str = "While the store is away: wait, and train on as long as the nodes hear from \
     each other, or fence, and stop before the lease ends [default: wait]";
pub(super) const SHUTDOWN_TIMEOUT: &str = "From a worker's stop signal to SIGKILL; the same as stop_grace, before \
     which it goes. Also TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
pub(super) const SIGNALS: &str = "Signals that make the agent leave, and that it passes on to its workers \
     [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT, without those that nohup or a shell had it ignore]";
pub(super) const DRAIN_GRACE: &str = "The same for workers of a node that leaves (SIGTERM, elasticctl drain), which \
     may want to save more; the others wait for them [default: as --shutdown-timeout]";
pub(super) const WARM_UP: &str = "Start the workers before this node joins, so that the others do not wait for what they \
     load, and wait for so long until they are ready: for workers that know about rounds, as elastic-trainer does \
     [default: they start in their round]";
pub(super) const PROGRESS_TIMEOUT: &str = "A worker that gives no sign of progress for so long hangs, and fails: neither \
     a new step told over its socket, nor output to files, nor a timer. Its stacks are kept [default: no limit]";
pub(super) const HEALTH_PORT: &str = "Tell health over HTTP: /live, /ready, /metrics, and / for JSON. To this machine \
     alone, unless an address is given: 0.0.0.0:PORT for all. Also TORCHELASTIC_HEALTH_CHECK_PORT [default: none]";
pub(super) const MONITOR_INTERVAL: &str = "Accepted for torchrun's sake and not used: exits and changes are events \
     here, nothing polls";
pub(super) const MODULE: &str = "PROGRAM is a Python module, run as python -m does";
pub(super) const NO_PYTHON: &str = "PROGRAM is run as it is. Without this it is given to $PYTHON_EXEC, else \
     $VIRTUAL_ENV/bin/python, else the first python3 or python on PATH";
pub(super) const RUN_PATH: &str = "PROGRAM is run by Python's runpy.run_path, as __main__";
pub(super) const USE_ENV: &str = "Do not pass --local-rank: the script reads LOCAL_RANK";
pub(super) const START_METHOD: &str = "Accepted for torchrun's sake and not used: every worker is a process of its own \
     program, none is forked from Python (spawn, fork, forkserver)";
pub(super) const LOG_DIR: &str = "Where workers' logs and error files go; /dev/null for none [default: a fresh \
     temporary directory]";
pub(super) const REDIRECTS: &str = "Streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: \
     0:3,1:2 [default: 0]";
pub(super) const TEE: &str = "Streams that go to files and to the console, each line with the worker's name; the \
     same form as --redirects [default: 0]";
pub(super) const LOG_LINE_PREFIX: &str = "What stands before each tee'd line on the console, with ${role_name}, \
     ${local_rank}, ${rank} and ${hostname} [default: [${role_name}${local_rank}]:]. Also \
     TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
pub(super) const LOCAL_RANKS_FILTER: &str = "Local ranks whose output reaches the console [default: all]";
pub(super) const DUPLICATE_STDOUT: &str = "Lines of tee'd standard outputs with any of these words are copied to \
     filtered_stdout.log; two commas stand for one";
pub(super) const DUPLICATE_STDERR: &str = "The same for standard errors and filtered_stderr.log";
pub(super) const LOG_ROTATE: &str = "Begin a log file anew when it has this size, with K, M or G, and keep so many \
     full ones [default: never; 4 are kept]";
pub(super) const REPORT: &str = "How the end is told: text on standard error, or also json, one line on standard \
     output [default: text]";
pub(super) const VERBOSE: &str = "Say more; twice: everything. Also LOGLEVEL (DEBUG, INFO, WARNING, ERROR)";
pub(super) const JSON_LOGS: &str = "The agent's own log as one JSON object a line";
pub(super) const EVENT_LOG_HANDLER: &str = "torchrun's events about workers: null, or console for one JSON object a line \
     on standard error [default: null]";
pub(super) const PRINT_COMPLETION: &str = "Print a script that completes these flags: bash, zsh, fish or tcsh";
pub(super) const HELP: &str = "Print this";
