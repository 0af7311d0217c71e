//! Real etcd servers on loopback ports that the kernel picks. Tests kill, freeze and restart them. Only
//! [`version_server`] is a stand-in: for versions that cannot be installed, where only the version number matters.

mod certs;
pub(crate) mod process;
mod releases;
mod version;

pub use certs::Certs;
pub use process::free_port;
pub use releases::{RELEASES, etcd_of, usual_etcd};
pub use version::version_server;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use elastic_store::etcd::{EtcdConfig, EtcdStore, EtcdTls};
use elastic_store::{Revision, Store};
use etcd_client::{
    Certificate, Client, ConnectOptions, DowngradeOptions, Identity, MemberAddOptions, Permission, PermissionType,
    TlsOptions,
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::contract::Subject;
use crate::processes::Process;
use crate::wait::{eventually, within};

/// The longest that a server may take to be ready.
const READY: Duration = Duration::from_secs(15);

/// Elections are quick here. That makes the shortest lease short too (1 s), since etcd derives it from these times.
const HEARTBEAT_MS: u32 = 50;
const ELECTION_MS: u32 = 500;

/// How to start a server.
#[derive(Clone, Default)]
pub struct EtcdOptions {
    /// The binary; by default [`usual_etcd`].
    pub binary: Option<PathBuf>,
    /// Further command-line arguments.
    pub args: Vec<String>,
    /// Serve clients over TLS.
    pub tls: Option<Arc<Certs>>,
    /// Ask clients for a certificate.
    pub client_certificates: bool,
}

#[derive(Clone)]
struct Member {
    name: String,
    client_port: u16,
    peer_port: u16,
    cluster: String,
}

impl Member {
    fn alone() -> Member {
        let [client_port, peer_port] = process::free_ports();
        let name = "alone".to_owned();
        let cluster = format!("{name}=http://127.0.0.1:{peer_port}");
        Member { name, client_port, peer_port, cluster }
    }
}

impl EtcdOptions {
    /// One for each of these releases that is here, with its name.
    pub fn of<const N: usize>(releases: [&'static str; N]) -> Vec<(&'static str, EtcdOptions)> {
        let of = |release| Some((release, EtcdOptions { binary: Some(etcd_of(release)?), ..EtcdOptions::default() }));
        releases.into_iter().filter_map(of).collect()
    }

    /// A server that offers the v2 API beside v3: the machine's own. etcd 3.6 has that API no more.
    pub fn with_v2() -> EtcdOptions {
        EtcdOptions::oldest().args(["--enable-v2"])
    }

    /// The machine's own server, which could offer the v2 API and does not.
    pub fn oldest() -> EtcdOptions {
        EtcdOptions { binary: Some(releases::own_etcd()), ..EtcdOptions::default() }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> EtcdOptions {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }
}

/// One etcd server in a fresh directory. Dropping it kills it.
pub struct EtcdServer {
    dir: TempDir,
    options: EtcdOptions,
    member: Member,
    process: Option<Process>,
}

impl EtcdServer {
    /// Starts a server of its own and waits until it serves.
    pub async fn start(options: EtcdOptions) -> EtcdServer {
        // Another process may take a port after we have picked it and before the server binds it.
        for _ in 0..3 {
            let mut server = EtcdServer::prepare(options.clone(), Member::alone());
            server.spawn();
            if server.ready().await {
                return server;
            }
            eprintln!("etcd did not come up, trying other ports; its log:\n{}", server.log_tail());
        }
        panic!("etcd did not come up in three tries");
    }

    fn prepare(options: EtcdOptions, member: Member) -> EtcdServer {
        let dir = tempfile::Builder::new().prefix("elastic-etcd-").tempdir().expect("a temporary directory");
        EtcdServer { dir, options, member, process: None }
    }

    fn spawn(&mut self) {
        let Member { name, client_port, peer_port, cluster } = &self.member;
        let scheme = if self.options.tls.is_some() { "https" } else { "http" };
        let client_url = format!("{scheme}://127.0.0.1:{client_port}");
        let peer_url = format!("http://127.0.0.1:{peer_port}");
        let data_dir = self.data_dir();
        let mut args: Vec<String> = [
            "--name",
            name,
            "--data-dir",
            data_dir.to_str().expect("a path that is UTF-8"),
            "--listen-client-urls",
            &client_url,
            "--advertise-client-urls",
            &client_url,
            "--listen-peer-urls",
            &peer_url,
            "--initial-advertise-peer-urls",
            &peer_url,
            "--initial-cluster",
            cluster,
            "--heartbeat-interval",
            &HEARTBEAT_MS.to_string(),
            "--election-timeout",
            &ELECTION_MS.to_string(),
            "--log-level",
            "warn",
            "--logger",
            "zap",
        ]
        .map(str::to_owned)
        .to_vec();
        if let Some(certs) = &self.options.tls {
            let path = |path: &Path| path.to_str().expect("a path that is UTF-8").to_owned();
            args.extend(["--cert-file".into(), path(&certs.server.0), "--key-file".into(), path(&certs.server.1)]);
            if self.options.client_certificates {
                args.extend(["--client-cert-auth".into(), "--trusted-ca-file".into(), path(&certs.ca)]);
            }
        }
        args.extend(self.options.args.iter().cloned());
        let mut command = Command::new(self.options.binary.as_deref().unwrap_or_else(|| usual_etcd()));
        command.args(args).env("ETCDCTL_API", "3").env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH);
        self.process = Some(Process::spawn("etcd", command, &self.dir.path().join("log")));
    }

    /// Whether the server that we started, and no other, comes to answer a real request.
    async fn ready(&mut self) -> bool {
        let start = std::time::Instant::now();
        while start.elapsed() < READY {
            let process = self.process.as_mut().expect("a server that was started");
            if process.is_gone() {
                return false;
            }
            if process::owns_port(process.pid(), self.member.client_port) && self.answers().await {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }

    async fn answers(&self) -> bool {
        let request = async { self.try_client(None).await.ok()?.get("ready", None).await.ok() };
        match tokio::time::timeout(Duration::from_secs(2), request).await {
            Ok(Some(_)) => true,
            // With authentication on, a server that is ready refuses us.
            Ok(None) => self.options_refuse_strangers(),
            Err(_) => false,
        }
    }

    fn options_refuse_strangers(&self) -> bool {
        self.dir.path().join("auth").exists()
    }

    /// The last lines that the server wrote.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }

    /// Where it keeps its data.
    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// `host:port` for clients.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.member.client_port)
    }

    /// How our store connects to it.
    pub fn config(&self) -> EtcdConfig {
        let mut config = EtcdConfig::new([self.address()]);
        config.tls = self.options.tls.as_ref().map(|certs| EtcdTls {
            ca: certs.ca.clone(),
            client: self.options.client_certificates.then(|| certs.client.clone()),
            server_name: None,
        });
        config
    }

    /// Our store on it.
    pub fn store(&self) -> EtcdStore {
        EtcdStore::connect(self.config()).expect("a valid configuration")
    }

    /// A bare client, for what the store does not offer: compaction, users.
    pub async fn client(&self) -> Client {
        within("a bare client connects", READY, self.try_client(None)).await.expect("a bare client")
    }

    async fn try_client(&self, user: Option<(&str, &str)>) -> Result<Client, etcd_client::Error> {
        let mut options = ConnectOptions::new().with_connect_timeout(Duration::from_secs(1));
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        if let Some(certs) = &self.options.tls {
            let read = |path: &Path| std::fs::read(path).expect("a certificate");
            let identity = Identity::from_pem(read(&certs.client.0), read(&certs.client.1));
            let tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&certs.ca))).identity(identity);
            options = options.with_tls(tls);
        }
        Client::connect([self.address()], Some(options)).await
    }

    /// Switches authentication on, with user `root` and user `trainer`, who may only touch keys under `/elastic/`.
    pub async fn enable_auth(&self, root: &str, trainer: &str) {
        let mut client = self.client().await;
        client.user_add("root", root, None).await.expect("add root");
        client.role_add("root").await.expect("add role root");
        client.user_grant_role("root", "root").await.expect("grant root");
        client.user_add("trainer", trainer, None).await.expect("add trainer");
        client.role_add("trainer").await.expect("add role trainer");
        let own = Permission::new(PermissionType::Readwrite, "/elastic/").with_prefix();
        client.role_grant_permission("trainer", own).await.expect("grant keys");
        client.user_grant_role("trainer", "trainer").await.expect("grant role");
        client.auth_enable().await.expect("enable authentication");
        self.note_auth();
    }

    /// Says that authentication has been switched on by other means than [`EtcdServer::enable_auth`].
    pub fn note_auth(&self) {
        std::fs::write(self.dir.path().join("auth"), "").expect("note");
    }

    /// Makes etcd forget the tokens that it gave to a user: setting a password does, also the same one.
    pub async fn forget_tokens(&self, root: &str, user: &str, password: &str) {
        let mut client = self.try_client(Some(("root", root))).await.expect("root's client");
        client.user_change_password(user, password).await.expect("set the password");
    }

    /// Adds a role that no one has. Signed tokens from before are out of date then.
    pub async fn add_role(&self, root: &str, role: &str) {
        self.client_of("root", root).await.role_add(role).await.expect("add a role");
    }

    /// A bare client of this user.
    pub async fn client_of(&self, user: &str, password: &str) -> Client {
        within("a bare client logs in", READY, self.try_client(Some((user, password)))).await.expect("a user's client")
    }

    /// SIGKILL, and wait until it is dead.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again on the same data and ports, and waits until it serves.
    pub async fn restart(&mut self) {
        self.kill();
        self.spawn();
        assert!(self.ready().await, "etcd did not come up again; its log:\n{}", self.log_tail());
    }

    /// Kills it and starts it again on the same data and ports with the server of a release.
    pub async fn upgrade(&mut self, binary: PathBuf) {
        self.options.binary = Some(binary);
        self.restart().await;
    }

    /// Kills it, throws its data away and starts it again on the same ports, as a cluster with `token`.
    pub async fn replace(&mut self, token: &str) {
        self.kill();
        std::fs::remove_dir_all(self.data_dir()).expect("remove the data");
        self.options.args.extend(["--initial-cluster-token".to_owned(), token.to_owned()]);
        self.restart().await;
    }

    /// Saves what it holds to a file, as an operator makes a backup.
    pub fn snapshot(&self, to: &Path) {
        etcdctl(&["--endpoints", &self.address(), "snapshot", "save", &to.display().to_string()]);
    }

    /// Kills it, and starts it again on the same ports with the data of such a file.
    pub async fn restore(&mut self, from: &Path) {
        self.kill();
        std::fs::remove_dir_all(self.data_dir()).expect("remove the data");
        let Member { name, peer_port, cluster, .. } = &self.member;
        let peer_url = format!("http://127.0.0.1:{peer_port}");
        let (from, data_dir) = (from.display().to_string(), self.data_dir().display().to_string());
        let place = ["--name", name, "--initial-cluster", cluster, "--initial-advertise-peer-urls", &peer_url];
        etcdctl(&[&["snapshot", "restore", &from, "--data-dir", &data_dir][..], &place].concat());
        self.restart().await;
    }

    /// SIGSTOP: connections stay open and nothing answers. Returns when the last thread has stopped.
    pub async fn pause(&self) {
        let process = self.process.as_ref().expect("a running etcd");
        process.signal(Signal::STOP);
        eventually("etcd stops", READY, async || process::is_stopped(process.pid()).then_some(())).await;
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.process.as_ref().expect("a running etcd").signal(Signal::CONT);
    }
}

/// Runs etcd's own tool.
fn etcdctl(args: &[&str]) {
    let output = Command::new("etcdctl").env("ETCDCTL_API", "3").args(args).output().expect("run etcdctl");
    assert!(output.status.success(), "etcdctl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Three members on one machine.
pub struct EtcdCluster {
    /// The members.
    pub members: Vec<EtcdServer>,
}

impl EtcdCluster {
    /// Starts three members and waits until all serve.
    pub async fn start() -> EtcdCluster {
        EtcdCluster::start_with(EtcdOptions::default()).await
    }

    /// The same, each started with these options.
    pub async fn start_with(options: EtcdOptions) -> EtcdCluster {
        let ports: [u16; 6] = process::free_ports();
        let name = |n: usize| format!("member{n}");
        let cluster: Vec<_> = (0..3).map(|n| format!("{}=http://127.0.0.1:{}", name(n), ports[n + 3])).collect();
        let mut members: Vec<_> = (0..3)
            .map(|n| {
                let cluster = cluster.join(",");
                let member = Member { name: name(n), client_port: ports[n], peer_port: ports[n + 3], cluster };
                EtcdServer::prepare(options.clone(), member)
            })
            .collect();
        members.iter_mut().for_each(EtcdServer::spawn);
        for member in &mut members {
            assert!(member.ready().await, "a member did not come up; its log:\n{}", member.log_tail());
        }
        EtcdCluster { members }
    }

    /// How our store connects to all members.
    pub fn config(&self) -> EtcdConfig {
        EtcdConfig::new(self.members.iter().map(EtcdServer::address))
    }

    /// Switches authentication on, as [`EtcdServer::enable_auth`] does.
    pub async fn enable_auth(&self, root: &str, trainer: &str) {
        self.members[0].enable_auth(root, trainer).await;
        self.members.iter().for_each(EtcdServer::note_auth);
    }

    /// Adds a member that has no vote yet, which takes neither reads nor writes, and waits until it listens.
    pub async fn add_learner(&mut self) {
        let first = &self.members[0];
        let [client_port, peer_port] = process::free_ports();
        let url = format!("http://127.0.0.1:{peer_port}");
        let learner = MemberAddOptions::new().with_is_learner();
        // Members who have just met take no further one.
        eventually("a learner is taken", READY, async || {
            first.client().await.member_add([url.clone()], Some(learner.clone())).await.ok()
        })
        .await;
        let name = "learner".to_owned();
        let cluster = format!("{},{name}={url}", first.member.cluster);
        let options = first.options.clone().args(["--initial-cluster-state=existing"]);
        let mut server = EtcdServer::prepare(options, Member { name, client_port, peer_port, cluster });
        server.spawn();
        let pid = server.pid().expect("a learner that runs");
        eventually("the learner listens", READY, async || process::owns_port(pid, client_port).then_some(())).await;
        self.members.push(server);
    }

    /// Gives that member a vote, once it has what the others have, and waits until it serves.
    pub async fn promote_learner(&mut self) {
        let first = &self.members[0];
        let listed = first.client().await.member_list().await.expect("the members");
        let id = listed.members().iter().find(|member| member.is_learner()).expect("a learner").id();
        eventually("the learner is promoted", READY, async || first.client().await.member_promote(id).await.ok()).await;
        let learner = self.members.last_mut().expect("a member");
        assert!(learner.ready().await, "the member does not serve; its log:\n{}", learner.log_tail());
    }

    /// Allows members of this older release (`3.5`), and waits until what each keeps is as that reads it.
    pub async fn allow_downgrade(&self, release: &str) {
        let target = format!("{release}.0");
        let enable = DowngradeOptions::Enable(target.clone());
        eventually("a downgrade is allowed", READY, async || {
            self.members[0].client().await.maintenance_client().downgrade(enable.clone()).await.ok()
        })
        .await;
        for member in &self.members {
            let kept = async || {
                let status = member.client().await.status().await.ok()?;
                (status.storage_version() == target).then_some(())
            };
            eventually("the storage is of the older release", READY, kept).await;
        }
    }

    /// The index of the member that leads, as it tells this user: 3.5 tells a certificate of no user nothing.
    pub async fn leader(&self, user: Option<(&str, &str)>) -> usize {
        eventually("the cluster has a leader", READY, async || {
            for (n, member) in self.members.iter().enumerate().filter(|(_, member)| member.process.is_some()) {
                let Ok(mut client) = member.try_client(user).await else { continue };
                let Ok(status) = client.status().await else { continue };
                if status.leader() != 0 && status.header()?.member_id() == status.leader() {
                    return Some(n);
                }
            }
            None
        })
        .await
    }
}

/// A server whose tokens are signed (JWT) and last so long (`10m`), and the file of the key, which must outlive it.
pub fn signed_tokens(options: EtcdOptions, ttl: &str) -> (EtcdOptions, tempfile::NamedTempFile) {
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(key.path(), "what tokens are signed with").expect("write the key");
    let tokens = format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl={ttl}", key.path().display());
    (options.args([tokens]), key)
}

/// An etcd server as a subject of the contract.
pub async fn subject(binary: Option<PathBuf>) -> Subject {
    let server = EtcdServer::start(EtcdOptions { binary, ..Default::default() }).await;
    let store: Arc<dyn Store> = Arc::new(server.store());
    let client = server.client().await;
    let compact = move |revision: Revision| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut client = client.clone();
        Box::pin(async move {
            client.compact(revision.0, None).await.expect("compact");
        })
    };
    Subject::new(store, Arc::new(compact)).keeping(server)
}
