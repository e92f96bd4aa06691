//! Direct connections, as the kernel tells of them.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use adit_common::{COUNTERS, Counter, Direct, DirectEnd};
use aya::maps::{Map, MapData, RingBuf};
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

use super::{Maps, SteerError, sys};

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
        sys::changing_entries(self.maps.direct.as_fd()).map_err(|error| SteerError::Map {
            doing: "reading direct connections",
            error,
        })
    }

    /// What could not be told.
    pub fn losses(&self) -> Result<Losses, SteerError> {
        let mut values = [0; COUNTERS as usize];
        for (index, value) in values.iter_mut().enumerate() {
            *value = sys::get_per_cpu(self.maps.counters.as_fd(), index as u32)
                .map_err(|error| SteerError::Map {
                    doing: "reading counters",
                    error,
                })?
                .into_iter()
                .sum();
        }
        Ok(Losses {
            ends: values[Counter::LostEnds as usize],
            sent: values[Counter::LostSent as usize],
            received: values[Counter::LostReceived as usize],
            unrecorded: values[Counter::Unrecorded as usize],
        })
    }
}

/// The ring that tells the ends of direct connections.
pub struct DirectEnds(RingBuf<MapData>);

impl DirectEnds {
    pub(super) fn of(maps: &Maps) -> Result<Self, SteerError> {
        let failed = |error: &dyn std::fmt::Display| SteerError::Map {
            doing: "opening the ring of events",
            error: std::io::Error::other(error.to_string()),
        };
        let ring = maps.events.try_clone().map_err(|error| failed(&error))?;
        let map = MapData::from_fd(ring).map_err(|error| failed(&error))?;
        Ok(Self(
            RingBuf::try_from(Map::RingBuf(map)).map_err(|error| failed(&error))?,
        ))
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
