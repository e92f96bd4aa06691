//! The cgroup programs: loaded beside those that may be there, then put in their place.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::error::at;
use super::kubelet::Kubelet;
use super::object::{Object, ProgramSpec};
use super::pins::Pins;
use super::pod::HeldPods;
use super::verdicts::SourceNumbers;
use super::{
    CGROUP_PROGRAMS, KubeletSettings, LogScope, Maps, SK_LOOKUP, SteerError, SteerSettings, Steering, cgroup_id, sys,
};

/// Programs that are loaded, and work on the pinned maps, but are not attached yet.
pub struct Prepared {
    pods_cgroup: PathBuf,
    pins: Option<Pins>,
    object: Object,
    programs: CgroupPrograms,
    kubelet: Option<(KubeletSettings, Kubelet)>,
    adopts: bool,
    log: LogScope,
}

impl Prepared {
    /// Opens the maps that are pinned, makes those that are not, and loads the programs. What the kernel lacks is found
    /// out where it refuses something. Nothing is steered otherwise than before.
    pub fn new(settings: &SteerSettings) -> Result<Self, SteerError> {
        let pins = Pins::open(&settings.bpf_dir, settings.layout)?;
        let mut prepared = Self::load(&settings.pods_cgroup, Some(pins), &settings.log, &settings.map_entries)?;
        if let Some(kubelet) = &settings.kubelet {
            let loaded = Kubelet::load(kubelet, &prepared.object)?;
            prepared.kubelet = Some((kubelet.clone(), loaded));
        }
        Ok(prepared)
    }

    fn load(
        cgroup: &Path,
        pins: Option<Pins>,
        log: &LogScope,
        map_entries: &HashMap<String, u32>,
    ) -> Result<Self, SteerError> {
        // What is wrong with the cgroup is to be said before anything is made.
        Target::open(cgroup, PODS)?;
        let adopts = match &pins {
            Some(pins) => pins.in_force()?,
            None => false,
        };
        let object = Object::open(log, pins.as_ref(), map_entries)?;
        Ok(Self {
            pods_cgroup: cgroup.to_owned(),
            pins,
            programs: CgroupPrograms::load(PODS, &CGROUP_PROGRAMS, &object)?,
            object,
            kubelet: None,
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
        let mut links = Vec::new();
        self.programs.put(&self.pods_cgroup, &mut links, self.pins.as_ref())?;
        let logging_program = self.programs.last_id()?;
        if let Some((settings, _)) = &self.kubelet {
            maps.set_kubelet(settings)?;
        }
        let pods = HeldPods::adopted(&maps, self.pins.as_ref())?;
        let sources = SourceNumbers::above(pods.by_cookie.values().map(|pod| pod.entry.source).max());
        Ok(Steering {
            pods_cgroup: self.pods_cgroup,
            programs: self.programs,
            links: Mutex::new(links),
            kubelet: self.kubelet.map(|(_, kubelet)| kubelet),
            maps: Arc::new(maps),
            sources,
            lookup: Mutex::new(self.object.into_template(SK_LOOKUP)?),
            pins: self.pins,
            pods: Mutex::new(pods),
            log: self.log,
            log_taken: AtomicBool::new(false),
            logging_program,
        })
    }
}

impl Steering {
    /// Programs and maps of their own, attached to nothing but `cgroup`, for a self-test that is to touch nothing. All
    /// goes when this is dropped.
    pub fn isolated(cgroup: &Path) -> Result<Self, SteerError> {
        Prepared::load(cgroup, None, &LogScope::None, &HashMap::new())?.attach()
    }
}

/// Whose cgroup programs are attached to, as errors name it.
const PODS: &str = "the pods' cgroup";

/// Loaded programs, in the order in which they are attached.
pub(super) struct CgroupPrograms {
    whose: &'static str,
    loaded: Vec<(ProgramSpec, OwnedFd)>,
}

/// The cgroup that programs are attached to.
struct Target {
    whose: &'static str,
    cgroup: File,
    id: u64,
}

impl Target {
    fn open(path: &Path, whose: &'static str) -> Result<Self, SteerError> {
        let cgroup = File::open(path).map_err(|error| SteerError::Cgroup {
            path: path.to_owned(),
            error,
        })?;
        Ok(Self {
            whose,
            cgroup,
            id: cgroup_id(path)?,
        })
    }

    fn has(&self, link: &OwnedFd) -> bool {
        sys::link_info(link.as_fd()).is_ok_and(|info| info.cgroup == self.id)
    }
}

impl CgroupPrograms {
    /// Loads programs that belong to `whose` cgroup.
    pub(super) fn load(whose: &'static str, programs: &[ProgramSpec], object: &Object) -> Result<Self, SteerError> {
        let loaded = programs.iter().map(|program| Ok((*program, object.load(*program)?)));
        Ok(Self {
            whose,
            loaded: loaded.collect::<Result<_, SteerError>>()?,
        })
    }

    /// Puts each program in its place: into the link in `links`, or the pinned one, or a new one. Returns what was not
    /// as it should be, which is most of it where another process's programs are replaced.
    pub(super) fn put(
        &self,
        cgroup: &Path,
        links: &mut Vec<OwnedFd>,
        pins: Option<&Pins>,
    ) -> Result<Vec<String>, SteerError> {
        let target = Target::open(cgroup, self.whose)?;
        let mut changes = Vec::new();
        for (place, (program, loaded)) in self.loaded.iter().enumerate() {
            let own = links
                .get(place)
                .filter(|link| target.has(link))
                .map(|link| link.as_fd());
            if let Some(new) = put(*program, loaded, own, &target, pins, &mut changes)? {
                if place < links.len() {
                    // Gone with its cgroup, or detached.
                    let _ = sys::detach_link(links[place].as_fd());
                    links[place] = new;
                } else {
                    links.push(new);
                }
            }
        }
        Ok(changes)
    }

    fn last_id(&self) -> Result<u32, SteerError> {
        let (_, last) = self.loaded.last().ok_or(SteerError::Missing("its programs"))?;
        sys::object_id(last.as_fd()).map_err(at("asking for a program's number"))
    }
}

/// Puts one program in its place. `own` is this process's link, if it has one where it should be; a link that is now in
/// its stead is returned.
fn put(
    program: ProgramSpec,
    loaded: &OwnedFd,
    own: Option<BorrowedFd<'_>>,
    target: &Target,
    pins: Option<&Pins>,
    changes: &mut Vec<String>,
) -> Result<Option<OwnedFd>, SteerError> {
    let failed = |error| SteerError::Attach {
        program: program.name,
        target: target.whose,
        error,
    };
    let pinned = match pins {
        Some(pins) if own.is_none() => pins.link(program.name)?,
        _ => None,
    };
    let link = match (own, pinned) {
        (Some(own), _) => own.try_clone_to_owned().map_err(failed)?,
        (None, Some(pinned)) if target.has(&pinned) => pinned,
        (None, stray) => {
            let new = sys::link(loaded.as_fd(), target.cgroup.as_fd(), program.attach).map_err(failed)?;
            changes.push(format!("{} was not attached to {}", program.name, target.whose));
            if let Some(stray) = stray {
                // Gone with its cgroup, or on one that is not meant any more.
                let _ = sys::detach_link(stray.as_fd());
            }
            new
        }
    };
    let wanted = sys::object_id(loaded.as_fd()).map_err(failed)?;
    if sys::link_info(link.as_fd()).map_err(failed)?.program != wanted {
        sys::update_link(link.as_fd(), loaded.as_fd()).map_err(failed)?;
        changes.push(format!("{} was another program", program.name));
    }
    if let Some(pins) = pins
        && pins.ensure_link(program.name, &link)?
    {
        changes.push(format!("the link of {} was not pinned", program.name));
    }
    // That the link is where it should be: links have been seen on a cgroup that was dying.
    let info = sys::link_info(link.as_fd()).map_err(failed)?;
    if info.cgroup != target.id {
        return Err(SteerError::Misattached {
            program: program.name,
            actual: info.cgroup,
            intended: target.id,
        });
    }
    Ok(own.is_none().then_some(link))
}
