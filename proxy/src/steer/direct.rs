//! Direct connections, as the kernel tells of them.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use adit_common::{Counter, Direct, DirectEnd};
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

/// What the kernel could not tell, since the maps were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Losses {
    /// Ends of connections that were not told: the ring was full.
    pub ends: u64,
    /// The bytes that these connections had sent.
    pub sent: u64,
    /// The bytes that these connections had received.
    pub received: u64,
    /// Connections that were not recorded, for want of memory.
    pub unrecorded: u64,
}

impl OpenDirect {
    pub(super) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// All of them, by their sockets' cookies.
    pub fn all(&self) -> Result<HashMap<u64, Direct>, SteerError> {
        sys::changing_entries(self.maps.direct.as_fd()).map_err(at("reading direct connections"))
    }

    /// What could not be told.
    pub fn losses(&self) -> Result<Losses, SteerError> {
        Ok(Losses {
            ends: self.maps.counted(Counter::LostEnds)?,
            sent: self.maps.counted(Counter::LostSent)?,
            received: self.maps.counted(Counter::LostReceived)?,
            unrecorded: self.maps.counted(Counter::Unrecorded)?,
        })
    }
}

/// The ring that tells the ends of direct connections.
pub struct DirectEnds(RingBuf<MapData>);

impl DirectEnds {
    pub(super) fn of(maps: &Maps) -> Result<Self, SteerError> {
        ring::open(&maps.events, "opening the ring of events").map(Self)
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
