//! Direct connections, as the kernel tells of them.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use adit_common::{Counter, Direct, DirectEnd, RefusalKind, RefusalShare, refusal_index};
use aya::maps::{MapData, RingBuf};
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::error::at;
use super::{Maps, SteerError, ring, sys};

/// How long ends are gathered before they are told: a wake-up for each would cost more than the connection.
const GATHER: Duration = Duration::from_millis(10);

/// The direct connections that are open.
#[derive(Clone)]
pub struct OpenDirect {
    maps: Arc<Maps>,
}

/// What the kernel could not tell at once or at all, since the maps were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Losses {
    /// Ends of connections that the ring had no room for: they wait in the map, or have been taken from there.
    pub late_ends: u64,
    /// Refusals that were not told one by one.
    pub untold_refusals: u64,
    /// Connections that were not recorded, for want of memory.
    pub unrecorded: u64,
    /// Connections that found no room in the map of flows.
    pub flows_full: u64,
}

impl OpenDirect {
    pub(super) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// All of them, by their sockets' cookies.
    pub fn all(&self) -> Result<HashMap<u64, Direct>, SteerError> {
        let mut all = self.recorded()?;
        all.retain(|_, direct| direct.state == 0);
        Ok(all)
    }

    /// Takes those that have ended, and whose end the ring had no room for. To be told by one process only.
    pub fn take_ended(&self) -> Result<Vec<DirectEnd>, SteerError> {
        let recorded = self.recorded()?.into_iter();
        let ended = recorded.filter(|(_, direct)| direct.state != 0);
        ended.filter_map(|(cookie, _)| self.take(cookie).transpose()).collect()
    }

    /// Takes what is recorded of one, ended or not. None where it has been told in the meantime.
    pub fn take(&self, cookie: u64) -> Result<Option<DirectEnd>, SteerError> {
        let direct = sys::take(self.maps.direct.as_fd(), &cookie).map_err(at("taking a direct connection's record"))?;
        Ok(direct.map(|direct| DirectEnd { direct, cookie }))
    }

    fn recorded(&self) -> Result<HashMap<u64, Direct>, SteerError> {
        sys::changing_entries(self.maps.direct.as_fd()).map_err(at("reading direct connections"))
    }

    /// How many refusals of this kind of the pod at `slot` have not been told one by one, ever.
    pub fn untold_refusals(&self, slot: u32, kind: RefusalKind) -> Result<u64, SteerError> {
        let share: Option<RefusalShare> = sys::get(self.maps.refused.as_fd(), &refusal_index(slot, kind))
            .map_err(at("reading how many refusals were told"))?;
        Ok(share.unwrap_or_default().untold)
    }

    /// What could not be told.
    pub fn losses(&self) -> Result<Losses, SteerError> {
        Ok(Losses {
            late_ends: self.maps.counted(Counter::LateEnds)?,
            untold_refusals: self.maps.counted(Counter::UntoldRefusals)?,
            unrecorded: self.maps.counted(Counter::Unrecorded)?,
            flows_full: self.maps.counted(Counter::FlowsFull)?,
        })
    }
}

/// A ring that tells the ends of direct connections, or refusals.
pub struct DirectEnds(RingBuf<MapData>);

impl DirectEnds {
    pub(super) fn of(maps: &Maps) -> Result<Self, SteerError> {
        ring::open(&maps.events, "opening the ring of events").map(Self)
    }

    pub(super) fn of_refusals(maps: &Maps) -> Result<Self, SteerError> {
        ring::open(&maps.refusals, "opening the ring of refusals").map(Self)
    }

    /// Tells each end to `tell`, for good, in batches.
    pub async fn follow(self, mut tell: impl FnMut(&DirectEnd)) -> std::io::Result<()> {
        #[expect(
            deprecated,
            reason = "the ring owns its descriptor, so it stays open as long as the registration"
        )]
        let mut ring = AsyncFd::new(self.0)?;
        loop {
            let mut ready = ring.readable_mut().await?;
            while let Some(item) = ready.get_inner_mut().next() {
                if let Some(end) = sys::from_bytes::<DirectEnd>(&item) {
                    tell(&end);
                }
            }
            ready.clear_ready();
            drop(ready);
            sleep(GATHER).await;
        }
    }
}
