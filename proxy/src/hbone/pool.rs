//! The tunnels of one worker, for whoever needs a stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{LocalBoxFuture, Shared};
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::client::OpenError;
use super::{HboneError, Stream, Tunnel};
use crate::identity::SpiffeId;

/// How often a request is made anew after its tunnel went away under it. A peer that hands over to its successor says
/// goodbye on all of its tunnels at once, and each may be found out by a request.
const STALE_RETRIES: u32 = 32;

/// How long a stream may take to open, tunnels that had to be made for it included. Each step has a shorter deadline
/// of its own; this one ends the efforts with a peer whose tunnels have no room as soon as they stand.
const OPEN_DEADLINE: Duration = Duration::from_secs(60);

/// What streams must have in common to share a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolKey {
    /// The identity that the tunnel's client shows.
    pub source: SpiffeId,
    /// The pod in whose namespace the tunnel is dialled.
    pub source_uid: Arc<str>,
    /// The pod's address that it is dialled from, which is what the peer sees.
    pub source_ip: IpAddr,
    /// The identity that the tunnel's server must show.
    pub destination: SpiffeId,
    /// The workload that the tunnel leads to. A pod that comes again has another, so that no stream for it meets a
    /// tunnel to its predecessor.
    pub destination_uid: Arc<str>,
    /// The tunnel's far end.
    pub addr: SocketAddr,
}

/// Makes a tunnel for a key.
pub type Dial = LocalBoxFuture<'static, Result<Rc<Tunnel>, HboneError>>;

type Dialling = Shared<LocalBoxFuture<'static, Result<(), HboneError>>>;

/// The tunnels. Belongs to one worker.
#[derive(Default)]
pub struct Pool {
    entries: RefCell<HashMap<PoolKey, Entry>>,
}

#[derive(Default)]
struct Entry {
    tunnels: Vec<Rc<Tunnel>>,
    /// A tunnel on its way; all who need one wait for it, each by its own deadline.
    dialling: Option<Dialling>,
}

impl Pool {
    /// Opens a stream, on a tunnel that there is or on one that `dial` makes. Cancelling leaves a tunnel that is on
    /// its way to others.
    pub async fn open(
        self: &Rc<Self>,
        key: &PoolKey,
        authority: SocketAddr,
        client: SocketAddr,
        dial: impl Fn() -> Dial,
    ) -> Result<Stream, HboneError> {
        let opened = async {
            let mut stale = 0;
            loop {
                let Some(tunnel) = self.with_room(key) else {
                    self.dialling(key, &dial).await?;
                    continue;
                };
                let place = tunnel.take_place();
                match tunnel.open(place, authority, client).await {
                    Ok(stream) => return Ok(stream),
                    Err(OpenError::Stale(_)) if stale < STALE_RETRIES => {
                        stale += 1;
                        self.forget(key, &tunnel);
                    }
                    Err(OpenError::Stale(error) | OpenError::Failed(error)) => return Err(error),
                }
            }
        };
        timeout(OPEN_DEADLINE, opened)
            .await
            .map_err(|_| HboneError::RequestTimeout)?
    }

    /// Lets go of the tunnels of a pod that has left.
    pub fn forget_source(&self, uid: &str) {
        self.entries.borrow_mut().retain(|key, _| &*key.source_uid != uid);
    }

    /// Lets go of tunnels to workloads that are no more.
    pub fn retain_destinations(&self, exists: impl Fn(&str) -> bool) {
        self.entries.borrow_mut().retain(|key, _| exists(&key.destination_uid));
    }

    /// Lets go of all tunnels; streams on them go on to their end, and whoever waits for a tunnel that is on its way
    /// still gets it.
    pub fn retire_all(&self) {
        self.entries.borrow_mut().retain(|_, entry| {
            entry.tunnels.drain(..).for_each(|tunnel| tunnel.retire());
            entry.dialling.is_some()
        });
    }

    fn with_room(&self, key: &PoolKey) -> Option<Rc<Tunnel>> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(key)?;
        entry.tunnels.retain(|tunnel| !tunnel.is_closed());
        entry.tunnels.iter().find(|tunnel| tunnel.has_room()).cloned()
    }

    fn dialling(
        self: &Rc<Self>,
        key: &PoolKey,
        dial: impl Fn() -> Dial,
    ) -> impl Future<Output = Result<(), HboneError>> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.entry(key.clone()).or_default();
        if let Some(dialling) = &entry.dialling {
            return dialling.clone();
        }
        // In a task of its own, so that it goes on whoever of those waiting gives up.
        let (pool, for_key, tunnel) = (Rc::clone(self), key.clone(), dial());
        let task = spawn_local(async move {
            let result = tunnel.await;
            let mut entries = pool.entries.borrow_mut();
            let Some(entry) = entries.get_mut(&for_key) else {
                if let Ok(tunnel) = result {
                    tunnel.retire();
                }
                return Err(HboneError::Connect("the pod or its peer has left".to_owned()));
            };
            entry.dialling = None;
            match result {
                Ok(tunnel) => {
                    entry.tunnels.push(tunnel);
                    Ok(())
                }
                Err(error) => {
                    if entry.tunnels.is_empty() {
                        entries.remove(&for_key);
                    }
                    Err(error)
                }
            }
        });
        let dialling = async { task.await.map_err(|_| HboneError::Connect("given up".to_owned()))? };
        let dialling = dialling.boxed_local().shared();
        entry.dialling = Some(dialling.clone());
        dialling
    }

    fn forget(&self, key: &PoolKey, tunnel: &Rc<Tunnel>) {
        tunnel.retire();
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get_mut(key) {
            entry.tunnels.retain(|other| !Rc::ptr_eq(other, tunnel));
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        for tunnel in &self.tunnels {
            tunnel.retire();
        }
    }
}
