//! The stores behind the narrow trait of [`elastic_rendezvous::store`].

pub mod etcd;
pub mod metered;

pub use elastic_rendezvous::store::*;
