//! Three members of etcd, each on a host of its own; or none, where the agents hold the store.

use elastic_tests::prelude::*;
use std::os::unix::process::CommandExt;

use anyhow::{Context, Result, bail};
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, ConnectOptions, DeleteOptions, PutOptions,
};

use super::hosts::Host;
use super::secrets::{Holder, Secrets};

/// Where agents hold the store.
pub(crate) const STORE_PORT: u16 = 29400;

const READY: Duration = Duration::from_secs(20);

/// How long etcd may refuse a change of its members.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) host: Host,
    child: Option<Child>,
    data: PathBuf,
    program: PathBuf,
    /// Whether it comes to a cluster that is there already.
    joins: bool,
}

pub(crate) struct Cluster {
    pub(crate) members: Vec<Member>,
    pub(crate) reach: Reach,
    folder: PathBuf,
}

#[derive(Clone, Default)]
pub(crate) struct Reach {
    pub(crate) addresses: Vec<String>,
    secrets: Option<Secrets>,
    as_root: bool,
}

impl Reach {
    pub(crate) async fn connect(&self, address: &str, options: ConnectOptions) -> Result<Client> {
        let options = match &self.secrets {
            Some(secrets) => secrets.connect_with(options, self.as_root)?,
            None => options,
        };
        Ok(Client::connect([address], Some(options)).await?)
    }
}

impl Cluster {
    /// Starts three members and waits until they have a leader.
    pub(crate) async fn start(
        hosts: &[Host],
        folder: &Path,
        program: &Path,
        secrets: Option<&Secrets>,
    ) -> Result<Cluster> {
        std::fs::create_dir_all(folder)?;
        let addresses = hosts.iter().map(|host| format!("{}:2379", host.address())).collect();
        let reach = Reach { addresses, secrets: secrets.cloned(), as_root: false };
        let member = |host: &Host| Member {
            host: host.clone(),
            child: None,
            data: folder.join(&host.name),
            program: program.to_owned(),
            joins: false,
        };
        let mut cluster = Cluster { members: hosts.iter().map(member).collect(), reach, folder: folder.to_owned() };
        for at in 0..cluster.members.len() {
            cluster.spawn(at)?;
        }
        cluster.leader().await?;
        if let Some(secrets) = secrets {
            secrets.ask_for_users(&mut cluster.client().await?).await?;
            cluster.reach.as_root = true;
        }
        Ok(cluster)
    }

    /// The store that the agents on these hosts hold. It begins and ends with them.
    pub(crate) fn of_agents(hosts: &[Host], folder: &Path) -> Cluster {
        let addresses = hosts.iter().map(|host| format!("{}:{STORE_PORT}", host.address())).collect();
        let reach = Reach { addresses, secrets: None, as_root: false };
        Cluster { members: Vec::new(), reach, folder: folder.to_owned() }
    }

    /// Which of the agents that hold the store serves it.
    pub(crate) async fn serving(&self) -> Result<usize> {
        let begun = Instant::now();
        while begun.elapsed() < READY {
            for (at, address) in self.reach.addresses.iter().enumerate() {
                let options = ConnectOptions::new()
                    .with_connect_timeout(Duration::from_millis(300))
                    .with_timeout(Duration::from_millis(1500));
                let Ok(mut client) = self.reach.connect(address, options).await else { continue };
                if client.get("/", None).await.is_ok() {
                    return Ok(at);
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("no agent serves the store")
    }

    /// The endpoints for agents: names, which the campaign's name server knows.
    pub(crate) fn endpoints(&self) -> String {
        let names: Vec<String> = self.members.iter().map(|member| format!("{}:2379", member.host.name)).collect();
        names.join(",")
    }

    fn spawn(&mut self, at: usize) -> Result<()> {
        let peers: Vec<String> = self
            .members
            .iter()
            .map(|member| format!("{}=http://{}:2380", member.host.name, member.host.address()))
            .collect();
        let member = &mut self.members[at];
        let address = member.host.address();
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"))?;
        let mut command = member.host.command();
        command.arg(&member.program).arg("--name").arg(&member.host.name).arg("--data-dir").arg(&member.data);
        let scheme = if self.reach.secrets.is_some() { "https" } else { "http" };
        command.args(self.reach.secrets.iter().flat_map(Secrets::of_a_member));
        for (flag, url) in
            [("client", format!("{scheme}://{address}:2379")), ("peer", format!("http://{address}:2380"))]
        {
            command.arg(format!("--listen-{flag}-urls={url}"));
            command.arg(format!("--{}advertise-{flag}-urls={url}", if flag == "peer" { "initial-" } else { "" }));
        }
        let cluster = if member.joins { "existing" } else { "new" };
        command.args(["--initial-cluster", &peers.join(","), "--initial-cluster-state", cluster]);
        // Of its log it then has 1,000 entries in memory, and 5,000 for members that come late: what a job writes in some
        // minutes. It would be some hours' by default, until etcd 3.6.
        command.args(["--heartbeat-interval=50", "--election-timeout=500", "--snapshot-count=1000"]);
        command.args(["--log-level=warn", "--logger=zap"]);
        command.stdout(log.try_clone()?).stderr(log).process_group(0);
        member.child = Some(command.spawn().context("start etcd")?);
        Ok(())
    }

    /// SIGKILL for a member.
    fn kill(&mut self, at: usize) {
        if let Some(mut child) = self.members[at].child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts the members that do not run.
    pub(crate) fn revive(&mut self) -> Result<()> {
        for at in 0..self.members.len() {
            let gone = self.members[at].child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)));
            if gone {
                self.spawn(at)?;
            }
        }
        Ok(())
    }

    /// The process of a member, while it runs.
    pub(crate) fn pid(&self, at: usize) -> Option<u32> {
        self.members[at].child.as_ref().map(Child::id)
    }

    /// Loses a member with all that it has, and puts a new one in its place.
    pub(crate) async fn replace(&mut self, at: usize) -> Result<()> {
        self.kill(at);
        std::fs::remove_dir_all(&self.members[at].data)?;
        let mut client = self.client().await?;
        let members = client.member_list().await?;
        let name = &self.members[at].host.name;
        let lost = members.members().iter().find(|member| member.name() == name).context("the lost member")?.id();
        patiently(async || client.member_remove(lost).await).await?;
        let peer = format!("http://{}:2380", self.members[at].host.address());
        patiently(async || client.member_add([peer.clone()], None).await).await?;
        self.members[at].joins = true;
        self.spawn(at)
    }

    /// Starts a member again with another program: a newer release.
    pub(crate) fn upgrade(&mut self, at: usize, program: &Path) -> Result<()> {
        self.kill(at);
        self.members[at].program = program.to_owned();
        self.spawn(at)
    }

    pub(crate) async fn client(&self) -> Result<Client> {
        let begun = Instant::now();
        while begun.elapsed() < READY {
            for address in &self.reach.addresses {
                let options = ConnectOptions::new()
                    .with_connect_timeout(Duration::from_millis(500))
                    .with_timeout(Duration::from_secs(5));
                let Ok(mut client) = self.reach.connect(address, options).await else { continue };
                if client.get("/", None).await.is_ok() {
                    return Ok(client);
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("no member of etcd answers; its log is {}", self.folder.join("log").display())
    }

    /// The index of the member that leads.
    pub(crate) async fn leader(&self) -> Result<usize> {
        let mut client = self.client().await?;
        let leader = client.status().await?.leader();
        let members = client.member_list().await?;
        let led = members.members().iter().find(|member| member.id() == leader).context("the leading member")?;
        let is_led = |member: &Member| format!("http://{}:2380", member.host.address());
        let at = self.members.iter().position(|member| led.peer_urls().contains(&is_led(member)));
        at.context("the leading member is one of ours")
    }

    /// Puts a value under a key as a client outside of the job: the revision of that.
    pub(crate) async fn put(&self, key: &str, value: &str) -> Result<i64> {
        let keeps = PutOptions::new().with_ignore_lease();
        let mut client = self.client().await?;
        let put = match client.put(key, value, Some(keeps)).await {
            Ok(put) => put,
            Err(_) => client.put(key, value, None).await?,
        };
        Ok(put.header().map_or(0, |header| header.revision()))
    }

    /// Deletes all keys that begin like this: the revision of that.
    pub(crate) async fn delete(&self, prefix: &str) -> Result<i64> {
        let deleted = self.client().await?.delete(prefix, Some(DeleteOptions::new().with_prefix())).await?;
        Ok(deleted.header().map_or(0, |header| header.revision()))
    }

    pub(crate) async fn compact(&self) -> Result<()> {
        let mut client = self.client().await?;
        let now = client.get("/", None).await?.header().map_or(0, |header| header.revision());
        client.compact(now, Some(CompactionOptions::new().with_physical())).await?;
        Ok(())
    }

    /// Raises the alarm that etcd raises when its quota is used up, or ends it: no write is taken meanwhile.
    pub(crate) async fn no_space(&self, yes: bool) -> Result<()> {
        let action = if yes { AlarmAction::Activate } else { AlarmAction::Deactivate };
        let mut client = self.client().await?;
        for member in client.member_list().await?.members() {
            let mut options = AlarmOptions::new();
            options.with_member(member.id());
            client.alarm(action, AlarmType::Nospace, Some(options)).await?;
        }
        Ok(())
    }

    pub(crate) async fn revoke_leases(&self) -> Result<()> {
        let mut client = self.client().await?;
        for lease in client.leases().await?.leases() {
            // It may have ended by itself.
            let _ = client.lease_revoke(lease.id()).await;
        }
        Ok(())
    }

    /// Makes certificates again, and starts all members again, so that every client has to show its own.
    pub(crate) fn renew(&mut self, holder: Holder, ended: bool) -> Result<()> {
        self.reach.secrets.as_ref().context("certificates")?.renew(holder, ended);
        (0..self.members.len()).for_each(|at| self.kill(at));
        self.revive()
    }

    /// What is asked of etcd's users in this job.
    pub(crate) async fn users(&self) -> Result<(Secrets, Client)> {
        let secrets = self.reach.secrets.clone().context("users of etcd")?;
        Ok((secrets, self.client().await?))
    }

    pub(crate) async fn move_leader(&self) -> Result<()> {
        let at = self.leader().await?;
        let mut client = self.reach.connect(&self.reach.addresses[at], ConnectOptions::new()).await?;
        let members = client.member_list().await?;
        let leader = client.status().await?.leader();
        let other = members.members().iter().find(|member| member.id() != leader).context("another member")?;
        client.move_leader(other.id()).await?;
        Ok(())
    }

    /// Has each member tidy its file, during which it answers no request.
    pub(crate) async fn defragment(&self) -> Result<()> {
        for address in &self.reach.addresses {
            self.reach.connect(address, ConnectOptions::new()).await?.defragment().await?;
        }
        Ok(())
    }

    /// The last lines of what members have written.
    pub(crate) fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

/// Asks etcd to change its members: just begun, or having just lost one, it refuses for some seconds.
async fn patiently<T>(mut ask: impl AsyncFnMut() -> Result<T, etcd_client::Error>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match ask().await {
            Ok(done) => return Ok(done),
            Err(error) if begun.elapsed() > PATIENCE => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(250)).await,
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|at| self.kill(at));
    }
}
