//! The list of flags: each flag's name, help and `PET_*` variable.
//!
//! The flags and their environment defaults are those of torchrun (torch 2.15), and ours.

use super::help;

/// An entry of the list of flags.
pub(super) enum Entry {
    Heading(&'static str),
    /// A flag: its name, what `--help` shows for its value if it takes one, and its help.
    Flag(&'static str, Option<&'static str>, &'static str),
}

const fn value(name: &'static str, shape: &'static str, help: &'static str) -> Entry {
    Entry::Flag(name, Some(shape), help)
}

const fn switch(name: &'static str, help: &'static str) -> Entry {
    Entry::Flag(name, None, help)
}

/// torchrun's flag that names a class of a Python package. It is known, and refused.
pub(super) const LOGS_SPECS: &str = "logs-specs";

/// Every flag, after its heading in `--help`.
pub(super) const FLAGS: &[Entry] = &[
    Entry::Heading("Nodes and workers"),
    value("nnodes", "N|MIN:MAX", help::NNODES),
    value("replica-nodes", "N", help::REPLICA_NODES),
    value("nproc-per-node", "N|auto|gpu|cpu|xpu", help::NPROC),
    value("node-name", "NAME", help::NODE_NAME),
    value("role", "NAME", help::ROLE),
    value("numa-binding", "MODE", help::NUMA_BINDING),
    switch("virtual-local-rank", help::VIRTUAL_LOCAL_RANK),
    Entry::Heading("Rendezvous"),
    value("rdzv-backend", "etcd|etcd-v2|c10d|static", help::BACKEND),
    value("rdzv-endpoint", "HOST[:PORT],…", help::ENDPOINT),
    value("rdzv-id", "ID", help::ID),
    value("rdzv-conf", "KEY=VALUE,…", help::CONF),
    switch("standalone", help::STANDALONE),
    value("node-rank", "RANK", help::NODE_RANK),
    value("master-addr", "HOST", help::MASTER_ADDR),
    value("master-port", "PORT", help::MASTER_PORT),
    value("local-addr", "HOST", help::LOCAL_ADDR),
    value("peer-port", "[ADDRESS:]PORT", help::PEER_PORT),
    value("peer-cert", "FILE", help::PEER_CERT),
    value("peer-key", "FILE", help::PEER_KEY),
    value("peer-ca", "FILE", help::PEER_CA),
    switch("insecure", help::INSECURE),
    switch("require-peer-tls", help::REQUIRE_PEER_TLS),
    switch("pin-interface", help::PIN_INTERFACE),
    Entry::Heading("Failures and restarts"),
    value("max-restarts", "N", help::MAX_RESTARTS),
    value("restarts-without-progress", "N", help::RESTARTS_WITHOUT_PROGRESS),
    value("exclude-after", "N", help::EXCLUDE_AFTER),
    value("restart-policy", "failures|all", help::RESTART_POLICY),
    value("on-store-loss", "wait|fence", help::ON_STORE_LOSS),
    value("shutdown-timeout", "TIME", help::SHUTDOWN_TIMEOUT),
    value("signals-to-handle", "NAME,…", help::SIGNALS),
    value("drain-grace", "TIME", help::DRAIN_GRACE),
    value("warm-up", "TIME", help::WARM_UP),
    value("preload", "MODULE,…", help::PRELOAD),
    switch("fresh", help::FRESH),
    switch("preflight", help::PREFLIGHT),
    value("preflight-command", "COMMAND", help::PREFLIGHT_COMMAND),
    value("preflight-peer-bandwidth", "RATE", help::PREFLIGHT_PEER_BANDWIDTH),
    value("preflight-timeout", "TIME", help::PREFLIGHT_TIMEOUT),
    value("progress-timeout", "TIME", help::PROGRESS_TIMEOUT),
    value("health-port", "[ADDRESS:]PORT", help::HEALTH_PORT),
    value("monitor-interval", "SECONDS", help::MONITOR_INTERVAL),
    Entry::Heading("Program"),
    switch("module", help::MODULE),
    switch("no-python", help::NO_PYTHON),
    switch("run-path", help::RUN_PATH),
    switch("use-env", help::USE_ENV),
    value("start-method", "METHOD", help::START_METHOD),
    Entry::Heading("Logs"),
    value("log-dir", "DIR", help::LOG_DIR),
    value("redirects", "STREAMS", help::REDIRECTS),
    value("tee", "STREAMS", help::TEE),
    value("log-line-prefix-template", "TEXT", help::LOG_LINE_PREFIX),
    value("local-ranks-filter", "RANK,…", help::LOCAL_RANKS_FILTER),
    value("duplicate-stdout-filters", "WORD,…", help::DUPLICATE_STDOUT),
    value("duplicate-stderr-filters", "WORD,…", help::DUPLICATE_STDERR),
    value("log-rotate", "SIZE[:KEEP]", help::LOG_ROTATE),
    value("log-attempts", "N", help::LOG_ATTEMPTS),
    value("report", "text|json", help::REPORT),
    switch("verbose", help::VERBOSE),
    switch("json-logs", help::JSON_LOGS),
    value("event-log-handler", "HANDLER", help::EVENT_LOG_HANDLER),
    Entry::Heading("Other"),
    switch("help", help::HELP),
    value("print-completion", "SHELL", help::PRINT_COMPLETION),
];

/// Whether a flag takes a value. None: there is no such flag.
pub(super) fn takes_value(name: &str) -> Option<bool> {
    let known = |entry: &Entry| match *entry {
        Entry::Flag(flag, shape, _) if flag == name => Some(shape.is_some()),
        _ => None,
    };
    FLAGS.iter().find_map(known)
}

/// The environment variable that holds a flag's default.
pub(super) fn variable(name: &str) -> String {
    format!("PET_{}", name.replace('-', "_").to_ascii_uppercase())
}
