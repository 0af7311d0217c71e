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

  Two machines, without etcd: the agent on node0 serves the store:
    elastic-agent --rdzv-backend=c10d --rdzv-endpoint=node0 --rdzv-id=JOB --nnodes=2 train.py

  A program that is not Python, its output shown and kept:
    elastic-agent --standalone --no-python --tee=3 --log-dir=logs ./train --rank '${rank}'

Arguments may hold ${local_rank} and ${rank}; $$ is a dollar.

Instead of torchrun, so that launch scripts need no change:
  elastic-agent torchrun-compat ...        as torchrun; or a link of that name
  elastic-agent launch-compat ...          as python -m torch.distributed.launch
  elastic-agent torchelastic-compat ...    as python -m torchelastic.distributed.launch (0.2.2)
A spare host of several jobs, which joins a job that lacks a node:
  elastic-agent spare FOLDER               see elastic-agent spare --help
To run a program with one of these names, write ./NAME, or put it after a flag or --.

Exit codes: 0 the job succeeded, 1 this node could not take part or its store was lost, 2 the command line is wrong, \
3 this node left as planned (a signal, or its operator), 4 the operator closed the job, 5 the job failed.";

pub(super) const NNODES: &str = "Number of nodes: one number, or MIN:MAX [default: 1]";
pub(super) const REPLICA_NODES: &str = "Nodes that hold one replica of a sharded model together: rounds have whole \
     replicas, and one that loses a node takes a spare or waits. --nnodes are multiples of it [default: 1]";
pub(super) const NPROC: &str = "Workers on this node: a number; one for each visible NVIDIA GPU (gpu), each CPU that \
     affinity and cgroup allow (cpu), or each Intel GPU (xpu); gpu if there are any and else cpu (auto) [default: 1]";
pub(super) const NODE_NAME: &str = "This node's name. Two agents of a job cannot share one [default: the host's name and a \
     code of this machine or container; further agents on it add -2, -3, …]";
pub(super) const ROLE: &str = "Name of this node's group of workers, used for ROLE_NAME, ROLE_RANK and log prefixes \
     [default: default]";
pub(super) const NUMA_BINDING: &str = "Bind each worker to CPUs near its GPU (the visible GPU whose index is its \
     local rank): to the GPU's NUMA node (node), all nodes of its socket (socket), an exclusive share of the node's \
     cores (exclusive), or cores that share a last-level cache (core-complex)";
pub(super) const VIRTUAL_LOCAL_RANK: &str = "Each worker sees only its own GPU, as device 0: LOCAL_RANK is 0 and \
     CUDA_VISIBLE_DEVICES names one GPU";
pub(super) const BACKEND: &str = "How nodes find each other: etcd (v3 API); etcd-v2 (torchrun's own `etcd` rendezvous \
     on the v2 API, together with torchrun nodes); c10d (a small store that the agent at the endpoint serves, or \
     three hold); or static (that store on --master-addr, ranks by --node-rank) [default: static; one node without an \
     address needs no store]";
pub(super) const NODE_RANK: &str = "This node's rank among the nodes, from 0; only for static [default: 0]";
pub(super) const MASTER_ADDR: &str = "Host name or address of the node with rank 0; only for static [default: \
     127.0.0.1]";
pub(super) const MASTER_PORT: &str = "Port on which the agent of node 0 serves the store; only for static. The \
     workers' MASTER_PORT is a new one in every round [default: 29500]";
pub(super) const ENDPOINT: &str = "Address of the store; several with commas: for etcd its members, for c10d three \
     agents that hold the store together. Default ports: etcd 2379, c10d 29400 [default: localhost]";
pub(super) const ID: &str = "The job's id. Agents with the same id train together. Letters, digits and ._-:@+= \
     [default: none, as with torchrun]";
pub(super) const CONF: &str = "Further settings, KEY=VALUE with commas: join_timeout (or timeout), last_call_timeout, \
     lease_ttl, margin, min_round_time, takeover_delay, start_timeout, stop_grace, drain_grace, quiesce_timeout \
     (times such as 30, 500ms, 10m); on_store_loss; prefix; job_protocol=N (begin \
     a new job with this version of the protocol, while some agents are of an older release); api=v3|v2 (etcd); \
     protocol=http|https, cacert, cert, key; user, password_file; is_host (c10d); workers_store=agent|workers, \
     workers_store_memory (256MiB), workers_store_open (false)";
pub(super) const STANDALONE: &str = "Train on this node alone, without a store; each start is a new job";
pub(super) const LOCAL_ADDR: &str = "Host name or address that other nodes use for this one [default: the address of \
     the network interface that reaches the store]";
pub(super) const PEER_PORT: &str = "Port on which this agent listens for other agents. ADDRESS: listen only there, also with a \
     store that it serves [default: any free port; all addresses, or the loopback address of --local-addr]";
pub(super) const PEER_CERT: &str = "PEM file of this node's certificate. Agents and coordinators of the job then speak \
     mutual TLS with each other; so do a store that an agent serves, and --health-port beyond loopback. Give it to all \
     agents of a job, or to none. elasticctl certs makes certificates. The agent reads a changed file within a second";
pub(super) const PEER_KEY: &str = "PEM file of that certificate's key";
pub(super) const PEER_CA: &str =
    "PEM file of the certificate authority. The agent accepts any certificate that it signed, whatever its name";
pub(super) const INSECURE: &str = "Every host that reaches the store of c10d or static is trusted: do not warn when it is \
     served without --peer-cert";
pub(super) const REQUIRE_PEER_TLS: &str = "Refuse a job of several hosts without --peer-cert";
pub(super) const PIN_INTERFACE: &str = "Make gloo and NCCL use only the network interface with this node's address \
     (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)";
pub(super) const MAX_RESTARTS: &str = "Restart the job after up to N failures, counted over all nodes; one more failure \
     ends the job [default: 0]";
pub(super) const RESTARTS_WITHOUT_PROGRESS: &str = "End the job after N restarts in a row that reached no new \
     step (the steps that workers report) [default: no limit but --max-restarts; \
     3 where the program fails the same way within a minute of each start]";
pub(super) const EXCLUDE_AFTER: &str = "Leave a node out after N counted failures of its workers, if there are enough other \
     nodes: for 5 minutes, then for longer each time; 0: never [default: 3]";
pub(super) const RESTART_POLICY: &str = "Events that count towards --max-restarts: only failures, or all changes of the \
     group, such as nodes that join or leave [default: failures]";
pub(super) const ON_STORE_LOSS: &str = "When the store cannot be reached: wait (train on while the nodes still reach \
     each other), or fence (stop before the lease ends) [default: wait]";
pub(super) const SHUTDOWN_TIMEOUT: &str = "Time from a worker's stop signal to SIGKILL. The same setting as \
     stop_grace; this flag wins. Also TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
pub(super) const SIGNALS: &str = "Signals that make the agent leave; it passes them on to its workers [default: \
     SIGTERM,SIGINT,SIGHUP,SIGQUIT, except those that nohup or a shell set to be ignored]";
pub(super) const DRAIN_GRACE: &str = "Time from the stop signal to SIGKILL for the workers of a node that leaves (SIGTERM, \
     elasticctl drain), so that they can save; the other nodes wait for them [default: as --shutdown-timeout]";
pub(super) const WARM_UP: &str = "Start the workers before this node joins, and wait up to TIME for them to report ready. \
     The other nodes then do not wait while they load. Round-aware workers only, such as elastic-trainer [default: workers \
     start with their round]";
pub(super) const PRELOAD: &str = "Import these modules once, in a process of its own, for example torch,torch._dynamo. \
     Workers that start later are forked from it, and find them imported: they compute again within a fraction of a second \
     [default: each worker imports what it needs]";
pub(super) const FRESH: &str = "Where the job has done steps and their state is lost, its sessions begin again at step 0. \
     Give it on all nodes [default: the job ends, and says what is lost]";
pub(super) const PREFLIGHT: &str = "Check this machine before the node joins, and exit with code 1 if it is not fit. It \
     needs 1 GiB free for logs and for temporary files, 64 MiB in /dev/shm, 1024 open files, and for each worker a GPU \
     that answers and has no uncorrected memory error, no memory to retire or remap, and no fatal Xid";
pub(super) const PREFLIGHT_COMMAND: &str = "Run COMMAND in the shell before the node joins. If COMMAND fails, the agent \
     prints its last lines and exits with code 1";
pub(super) const PREFLIGHT_PEER_BANDWIDTH: &str = "Before the node joins, up to three nodes of the job send bytes to \
     it, each for a second. The agent exits with code 1 if all are slower than RATE, in bits per second, such as 1Gbit or \
     800Mbit [default: not measured]";
pub(super) const PREFLIGHT_TIMEOUT: &str = "Time limit of each --preflight check. A command that takes longer has failed \
     [default: 60]";
pub(super) const PROGRESS_TIMEOUT: &str = "A worker with no progress for TIME is killed and counted as failed. \
     Progress is a new step reported over its socket, output to a log file, or a timer set or released. Its stacks \
     are saved first [default: no limit]";
pub(super) const HEALTH_PORT: &str = "Serve health over HTTP: /live, /ready, /metrics, and / as JSON. On 127.0.0.1 \
     unless an address is given: 0.0.0.0:PORT for all. Also TORCHELASTIC_HEALTH_CHECK_PORT [default: none]";
pub(super) const MONITOR_INTERVAL: &str = "Accepted because torchrun has it, and ignored: the agent does not poll, and \
     learns of exits and changes at once";
pub(super) const MODULE: &str = "Run PROGRAM as a Python module, like python -m";
pub(super) const NO_PYTHON: &str = "Run PROGRAM directly. Without this flag, $PYTHON_EXEC runs it, else the \
     Python of the environment that the agent is installed in, else the first python3 or python on PATH";
pub(super) const RUN_PATH: &str = "Run PROGRAM by Python's runpy.run_path, as __main__";
pub(super) const USE_ENV: &str = "Do not pass --local-rank; the script reads LOCAL_RANK";
pub(super) const START_METHOD: &str = "Accepted because torchrun has it, and ignored: the agent starts every worker as a \
     program, and forks none from Python (spawn, fork, forkserver)";
pub(super) const LOG_DIR: &str = "Directory for workers' logs and error files; /dev/null for none [default: a new \
     temporary directory]";
pub(super) const REDIRECTS: &str = "Streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2 \
     [default: 0]";
pub(super) const TEE: &str = "Streams that go to files and also to the console, where each line begins with the worker's \
     name; the values are those of --redirects [default: 0]";
pub(super) const LOG_LINE_PREFIX: &str = "Prefix of each tee'd line on the console; may hold ${role_name}, \
     ${local_rank}, ${rank} and ${hostname} [default: [${role_name}${local_rank}]:]. Also \
     TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
pub(super) const LOCAL_RANKS_FILTER: &str = "Local ranks whose output reaches the console [default: all]";
pub(super) const DUPLICATE_STDOUT: &str = "Copy lines of tee'd standard output that contain one of these words to \
     filtered_stdout.log; write two commas for a comma";
pub(super) const DUPLICATE_STDERR: &str = "Copy lines of tee'd standard error that contain one of these words to \
     filtered_stderr.log; write two commas for a comma";
pub(super) const LOG_ROTATE: &str = "Start a new log file when one reaches SIZE (with K, M or G), and keep KEEP full ones \
     [default: never; 4 are kept]";
pub(super) const LOG_ATTEMPTS: &str = "Keep the log folders of the newest N attempts, and of those that workers still write \
     to; the agent removes older ones [default: all are kept]";
pub(super) const REPORT: &str = "Form of the report at the end of the job: text on standard error; json adds one line \
     on standard output [default: text]";
pub(super) const VERBOSE: &str = "Log more; -vv logs everything. Also LOGLEVEL (DEBUG, INFO, WARNING, ERROR)";
pub(super) const JSON_LOGS: &str = "Write the agent's own log as JSON, one object a line";
pub(super) const EVENT_LOG_HANDLER: &str = "torchrun's events about workers: null, or console: one JSON object a line \
     on standard error [default: null]";
pub(super) const PRINT_COMPLETION: &str = "Print a completion script for a shell: bash, zsh, fish or tcsh";
pub(super) const HELP: &str = "Print this help";
