//! What a member says of itself and of its cluster, for operators. No decision about a job is made by it.

use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType};

use super::EtcdStore;
use super::fault::Repeat;
use crate::{LeaseId, Result};

/// What a member says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// The etcd version it runs.
    pub version: String,
    /// Which cluster it belongs to.
    pub cluster: u64,
    /// Its own id.
    pub member: u64,
    /// The member that it follows, or itself; `None`: it knows no leader.
    pub leader: Option<u64>,
    /// Bytes of its database on disk.
    pub size: u64,
    /// Bytes of it that are in use: what defragmenting would leave.
    pub in_use: u64,
    /// The most that `size` may reach. etcd tells it since 3.6.
    pub quota: Option<u64>,
}

/// Why a member takes no writes, or must not be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Alarm {
    /// Its database has reached the quota.
    NoSpace,
    /// Its data differ from other members'.
    Corrupt,
}

impl EtcdStore {
    /// The endpoints, as URIs with scheme and port.
    pub fn endpoints(&self) -> &[String] {
        self.inner.connection.members.uris()
    }

    /// What the member in use says of itself. An error where the member knows no leader.
    pub async fn status(&self) -> Result<MemberStatus> {
        let connection = &self.inner.connection;
        let status =
            connection.call(Repeat::Safe, async |link| link.client.maintenance_client().status().await).await?;
        self.inner.met(status.header())?;
        let (cluster, member) = status.header().map_or((0, 0), |header| (header.cluster_id(), header.member_id()));
        let bytes = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(MemberStatus {
            version: status.version().to_owned(),
            cluster,
            member,
            leader: Some(status.leader()).filter(|leader| *leader != 0),
            size: bytes(status.db_size()),
            in_use: bytes(status.raft_used_db_size()),
            quota: Some(bytes(status.db_size_quota())).filter(|quota| *quota > 0),
        })
    }

    /// The alarms of all members, by member id. [`StoreError::Denied`](crate::StoreError::Denied) where etcd tells its
    /// root user alone.
    pub async fn alarms(&self) -> Result<Vec<(u64, Alarm)>> {
        let connection = &self.inner.connection;
        let get = async |link: std::sync::Arc<super::connection::Link>| {
            link.client.maintenance_client().alarm(AlarmAction::Get, AlarmType::None, None).await
        };
        let answer = connection.call(Repeat::Safe, get).await?;
        self.inner.met(answer.header())?;
        let known = |alarm: AlarmType| match alarm {
            AlarmType::None => None,
            AlarmType::Nospace => Some(Alarm::NoSpace),
            AlarmType::Corrupt => Some(Alarm::Corrupt),
        };
        let alarms = answer.alarms().iter();
        Ok(alarms.filter_map(|member| Some((member.member_id(), known(member.alarm())?))).collect())
    }

    /// How long ago a lease was renewed, in whole seconds, rounded up, and for how long it was granted; `None`: it is
    /// gone.
    pub async fn lease_times(&self, lease: LeaseId) -> Result<Option<[Duration; 2]>> {
        let connection = &self.inner.connection;
        let ask = async |link: std::sync::Arc<super::connection::Link>| {
            link.client.lease_client().time_to_live(lease.0, None).await
        };
        let known = connection.call(Repeat::Safe, ask).await?;
        self.inner.met(known.header())?;
        let seconds = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let (left, granted) = (known.ttl(), known.granted_ttl());
        Ok((granted > 0).then(|| [seconds(granted - left), seconds(granted)]))
    }

    /// The addresses at which each member of the cluster says that clients reach it.
    pub async fn members(&self) -> Result<Vec<Vec<String>>> {
        let connection = &self.inner.connection;
        let list = connection.call(Repeat::Safe, async |link| link.client.cluster_client().member_list().await).await?;
        self.inner.met(list.header())?;
        Ok(list.members().iter().map(|member| member.client_urls().to_vec()).collect())
    }
}
