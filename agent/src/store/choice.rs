//! Which store a job meets through, as the command line says.

use std::path::PathBuf;

use elastic_rendezvous::job::Endpoint;

/// Where and how the nodes meet, as the command line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreOptions {
    pub choice: StoreChoice,
    /// The key prefix in the store, `/a/b`. None: the protocol's own.
    pub prefix: Option<String>,
    /// With `static`, the place that this node must have.
    pub place: Option<u32>,
    /// Whether the endpoint came by its variable, as in a pod. Then advice names variables too.
    pub by_variables: bool,
}

/// The store that nodes meet through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreChoice {
    /// One node. The store is inside this agent, and no other process sees it.
    Standalone,
    /// A store served by one of the agents.
    Hosted {
        endpoint: Endpoint,
        /// Whether this agent serves it. `None`: it does if the endpoint's host is this machine.
        is_host: Option<bool>,
    },
    /// A store that three of the agents hold together. Any two of them can serve it.
    Replicated {
        /// The agents that may serve it, sorted: each has the place of its endpoint.
        endpoints: Vec<Endpoint>,
    },
    Etcd {
        /// Members of the cluster, at least one.
        endpoints: Vec<Endpoint>,
        tls: Option<Tls>,
        credentials: Option<Credentials>,
        /// Whether to use TorchElastic's own rendezvous over the v2 API. Nodes of torchrun's `etcd` backend use it.
        v2: bool,
    },
}

impl StoreChoice {
    /// Whether this agent may come to serve the store at a port of its own.
    pub(crate) fn may_be_served_here(&self) -> bool {
        match self {
            StoreChoice::Hosted { is_host, .. } => *is_host != Some(false),
            StoreChoice::Replicated { .. } => true,
            StoreChoice::Standalone | StoreChoice::Etcd { .. } => false,
        }
    }

    /// The endpoints at which other nodes find the store. Empty if there are no other nodes.
    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        match self {
            StoreChoice::Standalone => &[],
            StoreChoice::Hosted { endpoint, .. } => std::slice::from_ref(endpoint),
            StoreChoice::Replicated { endpoints } | StoreChoice::Etcd { endpoints, .. } => endpoints,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Tls {
    /// Certificates to trust, as PEM. `None`: the system's.
    pub ca: Option<PathBuf>,
    /// This client's certificate and its key, PEM.
    pub client: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub user: String,
    /// File whose first line is the password. Not an argument, because everyone on the host can read a command line.
    pub password_file: PathBuf,
}
