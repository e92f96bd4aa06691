//! Which network namespaces are known not to be in the mesh, and what becomes of connects in those not known at all.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use adit_common::{Config, Counter, Pod, Stranger};
use aya::maps::{MapData, RingBuf};

use super::error::at;
use super::{Maps, SteerError, ring, sys};

pub use adit_common::Startup;

/// The classes that the kernel has of network namespaces, by their cookies.
#[derive(Clone)]
pub struct Namespaces {
    maps: Arc<Maps>,
}

/// How often namespaces were connected in that nobody had looked at yet, since the maps were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StartupCounts {
    /// Connects that were refused.
    pub refused: u64,
    /// Connects that passed.
    pub passed: u64,
}

impl Namespaces {
    pub(super) fn new(maps: Arc<Maps>) -> Self {
        Self { maps }
    }

    /// What becomes from now on of connects in namespaces that nobody has looked at.
    pub fn set_startup(&self, startup: Startup) -> Result<(), SteerError> {
        let startup = startup as u32;
        self.maps
            .change_config(|config| *config = Config { startup, ..*config })
    }

    /// Whether it is an enrolled pod's.
    pub fn is_enrolled(&self, cookie: u64) -> Result<bool, SteerError> {
        let pod: Option<Pod> = sys::get(self.maps.pods.as_fd(), &cookie).map_err(at("looking for a pod"))?;
        Ok(pod.is_some())
    }

    /// Whether it is known not to be in the mesh.
    pub fn is_other(&self, cookie: u64) -> Result<bool, SteerError> {
        let other: Option<u8> =
            sys::get(self.maps.others.as_fd(), &cookie).map_err(at("looking for a namespace outside the mesh"))?;
        Ok(other.is_some())
    }

    /// Says that it is not in the mesh.
    pub fn add_other(&self, cookie: u64) -> Result<(), SteerError> {
        sys::update(self.maps.others.as_fd(), &cookie, &1_u8, 0).map_err(at("entering a namespace outside the mesh"))
    }

    /// Says no more that it is not in the mesh.
    pub fn remove_other(&self, cookie: u64) -> Result<(), SteerError> {
        sys::delete(self.maps.others.as_fd(), &cookie).map_err(at("removing a namespace outside the mesh"))
    }

    /// All that are known not to be in the mesh.
    pub fn others(&self) -> Result<Vec<u64>, SteerError> {
        let all = sys::entries::<u64, u8>(self.maps.others.as_fd());
        Ok(all
            .map_err(at("reading namespaces outside the mesh"))?
            .into_keys()
            .collect())
    }

    /// What was refused and what passed.
    pub fn counts(&self) -> Result<StartupCounts, SteerError> {
        Ok(StartupCounts {
            refused: self.maps.counted(Counter::StartupRefused)?,
            passed: self.maps.counted(Counter::StartupPassed)?,
        })
    }

    /// The ring that tells of connects in namespaces that nobody has looked at. One reader only.
    pub fn strangers(&self) -> Result<Strangers, SteerError> {
        let doing = "opening the ring of connects in unknown namespaces";
        ring::open(&self.maps.strangers, doing).map(Strangers)
    }
}

/// The ring that tells of connects in namespaces that nobody has looked at; readable when there are some.
pub struct Strangers(RingBuf<MapData>);

impl Strangers {
    /// Takes the next of them out of the ring.
    pub fn take(&mut self) -> Option<Stranger> {
        self.0.next().and_then(|item| sys::from_bytes(&item))
    }
}

impl AsFd for Strangers {
    #[expect(unsafe_code, reason = "the ring gives its descriptor only as a number")]
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor, and is borrowed as long.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}
