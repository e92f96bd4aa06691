//! The rings by which the kernel programs tell of what happens.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;

use aya::maps::{Map, MapData, RingBuf};

use super::SteerError;
use super::error::at;

/// Opens a ring for reading; `doing` says so in errors.
pub(super) fn open(ring: &OwnedFd, doing: &'static str) -> Result<RingBuf<MapData>, SteerError> {
    let failed = |error: &dyn Display| at(doing)(io::Error::other(error.to_string()));
    let ring = ring.try_clone().map_err(at(doing))?;
    let map = MapData::from_fd(ring).map_err(|error| failed(&error))?;
    RingBuf::try_from(Map::RingBuf(map)).map_err(|error| failed(&error))
}
