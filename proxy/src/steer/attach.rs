//! The cgroup programs: loaded beside those that may be there, then put in their place.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::object::{Object, ProgramSpec};
use super::pins::Pins;
use super::pod::HeldPods;
use super::{CGROUP_PROGRAMS, LogScope, Maps, SK_LOOKUP, SteerError, SteerSettings, Steering, cgroup_id, sys};

/// Programs that are loaded, and work on the pinned maps, but are not attached yet.
pub struct Prepared {
    pins: Option<Pins>,
    object: Object,
    programs: Vec<(ProgramSpec, OwnedFd)>,
    cgroup: File,
    /// The cgroup's id.
    intended: u64,
    adopts: bool,
    log: LogScope,
}

impl Prepared {
    /// Opens the maps that are pinned, makes those that are not, and loads the programs. What the kernel lacks is found
    /// out where it refuses something. Nothing is steered otherwise than before.
    pub fn new(settings: &SteerSettings) -> Result<Self, SteerError> {
        let pins = Pins::open(&settings.bpf_dir)?;
        Self::load(&settings.pods_cgroup, Some(pins), &settings.log)
    }

    fn load(cgroup: &Path, pins: Option<Pins>, log: &LogScope) -> Result<Self, SteerError> {
        let target = File::open(cgroup).map_err(|error| SteerError::Cgroup {
            path: cgroup.to_owned(),
            error,
        })?;
        let intended = cgroup_id(cgroup)?;
        let adopts = match &pins {
            Some(pins) => pins.link(CGROUP_PROGRAMS[0].name)?.is_some(),
            None => false,
        };
        let object = Object::open(log, pins.as_ref())?;
        let mut programs = Vec::with_capacity(CGROUP_PROGRAMS.len());
        for program in CGROUP_PROGRAMS {
            programs.push((program, object.load(program)?));
        }
        Ok(Self {
            pins,
            object,
            programs,
            cgroup: target,
            intended,
            adopts,
            log: log.clone(),
        })
    }

    /// Whether another process's programs are there, and will be replaced.
    pub fn adopts(&self) -> bool {
        self.adopts
    }

    /// Puts the programs in their place, and verifies where they are. Pods that are enrolled stay so, with the listeners
    /// that they have.
    pub fn attach(self) -> Result<Steering, SteerError> {
        let maps = Maps::of(&self.object)?;
        maps.enter_own_cgroup()?;
        let mut links = Vec::with_capacity(self.programs.len());
        let mut logging_program = 0;
        for (program, loaded) in &self.programs {
            let (link, id) = self.put(*program, loaded)?;
            links.push(link);
            logging_program = id;
        }
        let pods = HeldPods::adopted(&maps, self.pins.as_ref())?;
        Ok(Steering {
            _links: links,
            maps,
            lookup: Mutex::new(self.object.into_template(SK_LOOKUP)?),
            pins: self.pins,
            pods: Mutex::new(pods),
            log: self.log,
            log_taken: AtomicBool::new(false),
            logging_program,
        })
    }

    /// Gives the link and the program's id.
    fn put(&self, program: ProgramSpec, loaded: &OwnedFd) -> Result<(OwnedFd, u32), SteerError> {
        let failed = |error| SteerError::Attach {
            program: program.name,
            target: "the pods' cgroup",
            error,
        };
        let old = match &self.pins {
            Some(pins) => pins.link(program.name)?,
            None => None,
        };
        let in_place = |link: &OwnedFd| sys::link_info(link.as_fd()).is_ok_and(|info| info.cgroup == self.intended);
        let link = match old {
            Some(link) if in_place(&link) => {
                sys::update_link(link.as_fd(), loaded.as_fd()).map_err(failed)?;
                link
            }
            other => {
                let link = sys::link(loaded.as_fd(), self.cgroup.as_fd(), program.attach).map_err(failed)?;
                if let Some(pins) = &self.pins {
                    pins.pin_link(program.name, &link)?;
                }
                if let Some(elsewhere) = other {
                    // Gone with its cgroup, or on one that is not meant any more.
                    let _ = sys::detach_link(elsewhere.as_fd());
                }
                link
            }
        };
        // That the link is where it should be: links have been seen on a cgroup that was dying.
        let info = sys::link_info(link.as_fd()).map_err(failed)?;
        if info.cgroup != self.intended {
            return Err(SteerError::Misattached {
                program: program.name,
                actual: info.cgroup,
                intended: self.intended,
            });
        }
        Ok((link, info.program))
    }
}

impl Steering {
    /// Programs and maps of their own, attached to nothing but `cgroup`, for a self-test that is to touch nothing. All
    /// goes when this is dropped.
    pub fn isolated(cgroup: &Path) -> Result<Self, SteerError> {
        Prepared::load(cgroup, None, &LogScope::None)?.attach()
    }
}
