//! A device that runs the CUDA sources on the CPU.
//!
//! The system's C++ compiler compiles the sources behind `emulator/larder_emulator.h`, once per
//! process, and the result is loaded as a library. The header states the model and its limits.
//!
//! Streams run on threads of their own, and a launch spreads its blocks over rayon's threads.

use super::software::Software;
use super::{Access, Arg, Device, DeviceError, DeviceInfo, Launch};
use crate::cuda::{KernelSource, SOURCES};
use rayon::prelude::*;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::HashMap;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const HEADER_NAME: &str = "larder_emulator.h";
const HEADER: &str = include_str!("../../emulator/larder_emulator.h");
/// Time for the compilation of all sources.
const COMPILE_LIMIT: Duration = Duration::from_secs(180);
/// Bytes of a compiler's messages that an error repeats.
const MESSAGE_LIMIT: usize = 4 << 10;
/// Length of the library's buffer for an error, as in the header.
const ERROR_BYTES: usize = 512;
/// Limits of a launch, as CUDA has them for compute capability 9.0.
const MAX_BLOCK_THREADS: u64 = 1024;
const MAX_SHARED_BYTES: u32 = 227 << 10;
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Opens a device with all kernels of this crate, and with at most `memory_limit` bytes. The first
/// call of a process takes the seconds of a compilation.
///
/// # Errors
/// If no C++ compiler runs, or if it rejects a source.
pub fn open(memory_limit: usize) -> Result<Arc<dyn Device>, DeviceError> {
    static EMULATOR: OnceLock<Result<Emulator, DeviceError>> = OnceLock::new();
    let emulator = EMULATOR.get_or_init(|| Emulator::compile(SOURCES)).clone()?;
    Ok(emulator.device(memory_limit))
}

/// Opens a device with the kernels of `sources` only. Compiles them at each call.
///
/// # Errors
/// As for [`open`].
pub fn open_with(sources: &[KernelSource], memory_limit: usize) -> Result<Arc<dyn Device>, DeviceError> {
    Ok(Emulator::compile(sources)?.device(memory_limit))
}

/// Compiled sources, from which devices are opened.
#[derive(Debug, Clone)]
pub struct Emulator {
    library: Arc<Library>,
}

impl Emulator {
    /// Compiles `sources`.
    ///
    /// # Errors
    /// If no C++ compiler runs, or if it rejects a source.
    pub fn compile(sources: &[KernelSource]) -> Result<Emulator, DeviceError> {
        Ok(Emulator { library: Arc::new(Library::build(sources)?) })
    }

    /// Opens a device of at most `memory_limit` bytes. Devices of one emulator share nothing but
    /// the compiled kernels.
    pub fn device(&self, memory_limit: usize) -> Arc<dyn Device> {
        let info = DeviceInfo {
            kind: "emulated",
            ordinal: 0,
            name: "emulated CUDA device".to_string(),
            memory_bytes: memory_limit,
            compute_capability: (0, 0),
            multiprocessors: rayon::current_num_threads() as u32,
        };
        Arc::new(Software::new(info, memory_limit, Some(Arc::clone(&self.library))))
    }
}

type Run = unsafe extern "C" fn(
    kernel: c_uint,
    args: *mut *mut c_void,
    grid: *const c_uint,
    block: *const c_uint,
    shared_bytes: usize,
    first: u64,
    count: u64,
    order: u64,
    error: *mut c_char,
) -> c_int;

struct Kernel {
    /// Index in its library.
    index: c_uint,
    /// One letter per parameter, as `Letter` of the header defines them.
    signature: String,
    run: Run,
}

/// The compiled sources.
pub(super) struct Library {
    kernels: HashMap<String, Kernel>,
    /// The functions in `kernels` are valid as long as these live.
    libraries: Vec<libloading::Library>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "library of {} emulated kernels", self.kernels.len())
    }
}

impl Library {
    fn build(sources: &[KernelSource]) -> Result<Library, DeviceError> {
        let folder = tempfile::Builder::new()
            .prefix("larder-kernels-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| failed("create a folder for compiled kernels", &error))?;
        write(&folder.path().join(HEADER_NAME), HEADER)?;
        let deadline = Instant::now() + COMPILE_LIMIT;
        let mut steps = Vec::new();
        for source in sources {
            write(&folder.path().join(source.file).with_extension("cpp"), &emulated_text(source))?;
            steps.push(Step::compile(folder.path(), source.file)?);
        }
        // The compilers run at the same time.
        steps.into_iter().try_for_each(|step| step.finish(deadline))?;
        let mut library = Library { kernels: HashMap::new(), libraries: Vec::new() };
        for source in sources {
            Step::link(folder.path(), source.file)?.finish(deadline)?;
            library.load(&folder.path().join(source.file).with_extension("so"), source)?;
        }
        // The mapped libraries outlive their files, which the folder's guard removes.
        Ok(library)
    }

    fn load(&mut self, path: &Path, source: &KernelSource) -> Result<(), DeviceError> {
        // libloading wraps the loader's message as the source of its error.
        let failed = |error: libloading::Error| match error.source() {
            Some(source) => failed("load the compiled kernels", source),
            None => failed("load the compiled kernels", &error),
        };
        // SAFETY: the compiler has just written the file into a private folder. The library's
        // initialisers set up its own state only.
        let library = unsafe { libloading::Library::new(path) }.map_err(failed)?;
        // SAFETY: the header defines these functions with these types. Both return strings that
        // live as long as the library.
        unsafe {
            let run = *library.get::<Run>(b"larder_run\0").map_err(failed)?;
            let name = *library
                .get::<unsafe extern "C" fn(c_uint) -> *const c_char>(b"larder_kernel_name\0")
                .map_err(failed)?;
            let signature = *library
                .get::<unsafe extern "C" fn(c_uint) -> *const c_char>(b"larder_kernel_signature\0")
                .map_err(failed)?;
            for index in 0..source.kernels.len() as c_uint {
                let text = |pointer| CStr::from_ptr(pointer).to_string_lossy().into_owned();
                self.kernels.insert(text(name(index)), Kernel { index, signature: text(signature(index)), run });
            }
        }
        self.libraries.push(library);
        Ok(())
    }

    /// Checks that `launch` fits the parameters of its kernel and the limits of a device.
    pub(super) fn check(&self, launch: &Launch) -> Result<(), DeviceError> {
        let kernel = self.kernel(launch.kernel)?;
        let refuse = |reason: String| Err(DeviceError::Launch { kernel: launch.kernel.to_string(), reason });
        let letters = kernel.signature.as_bytes();
        if letters.len() != launch.args.len() {
            return refuse(format!("{} arguments for {} parameters", launch.args.len(), letters.len()));
        }
        for (number, (arg, &letter)) in launch.args.iter().zip(letters).enumerate() {
            if !fits(arg, letter) {
                return refuse(format!("argument {number} does not fit the parameter's type {:?}", letter as char));
            }
        }
        let threads: u64 = launch.block.iter().map(|&size| u64::from(size)).product();
        if threads == 0 || threads > MAX_BLOCK_THREADS {
            return refuse(format!("{threads} threads per block, of at most {MAX_BLOCK_THREADS}"));
        }
        if launch.grid.iter().zip(MAX_GRID).any(|(&size, max)| size == 0 || size > max) {
            return refuse(format!("a grid of {:?} blocks", launch.grid));
        }
        if launch.shared_bytes > MAX_SHARED_BYTES {
            return refuse(format!("{} bytes of shared memory, of at most {MAX_SHARED_BYTES}", launch.shared_bytes));
        }
        Ok(())
    }

    fn kernel(&self, name: &str) -> Result<&Kernel, DeviceError> {
        self.kernels.get(name).ok_or_else(|| DeviceError::NoKernel(name.to_string()))
    }

    /// Runs all blocks of `launch`, which [`check`](Self::check) has accepted, and waits for them.
    /// Blocks of even and odd number run their threads in opposite orders; an odd `order` swaps
    /// them.
    ///
    /// # Safety
    /// As for [`Stream::launch`](super::Stream::launch). The memory of the arguments is allocated,
    /// and nothing else accesses it meanwhile unless both read.
    pub(super) unsafe fn run(&self, launch: &Launch, order: u64) -> Result<(), DeviceError> {
        let kernel = self.kernel(launch.kernel)?;
        let slots: Vec<u64> = launch.args.iter().map(Arg::slot).collect();
        let blocks: u64 = launch.grid.iter().map(|&size| u64::from(size)).product();
        let tasks = blocks.min(4 * rayon::current_num_threads() as u64);
        let run_task = |task: u64| {
            let bound = |task: u64| (u128::from(blocks) * u128::from(task) / u128::from(tasks)) as u64;
            let (first, end) = (bound(task), bound(task + 1));
            // Each task has its own copy, because parameters are passed by address.
            let mut slots = slots.clone();
            let mut args: Vec<*mut c_void> = slots.iter_mut().map(|slot| (&raw mut *slot).cast()).collect();
            let mut error: [c_char; ERROR_BYTES] = [0; ERROR_BYTES];
            // SAFETY: the arguments fit the kernel's parameters, as `check` has found. The caller
            // guarantees the accesses of the kernel. The buffer has the length that the header
            // expects, and ends with a zero byte.
            let ended = unsafe {
                (kernel.run)(
                    kernel.index,
                    args.as_mut_ptr(),
                    launch.grid.as_ptr(),
                    launch.block.as_ptr(),
                    launch.shared_bytes as usize,
                    first,
                    end - first,
                    order,
                    error.as_mut_ptr(),
                )
            };
            if ended != 0 {
                return Ok(());
            }
            let bytes: Vec<u8> = error.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
            let reason = String::from_utf8_lossy(&bytes).into_owned();
            Err(DeviceError::Kernel { kernel: launch.kernel.to_string(), reason })
        };
        (0..tasks).into_par_iter().try_for_each(run_task)
    }
}

fn fits(arg: &Arg, letter: u8) -> bool {
    match arg {
        Arg::Pointer(pointer) => letter == if pointer.access == Access::Read { b'r' } else { b'w' },
        Arg::Null => letter == b'r' || letter == b'w',
        Arg::U32(_) => letter == b'u',
        Arg::I32(_) => letter == b'i',
        Arg::U64(_) => letter == b'U',
        Arg::F32(_) => letter == b'f',
    }
}

fn failed(action: &'static str, error: &dyn Error) -> DeviceError {
    DeviceError::System { action, reason: error.to_string() }
}

fn write(path: &Path, content: &str) -> Result<(), DeviceError> {
    std::fs::write(path, content).map_err(|error| failed("write the sources of kernels", &error))
}

/// The source behind the emulator's header, with the list of its kernels.
fn emulated_text(source: &KernelSource) -> String {
    let list: Vec<String> = source.kernels.iter().map(|kernel| format!("LARDER_KERNEL({kernel})")).collect();
    let body = replace_dynamic_shared(&source.text());
    format!("#include \"{HEADER_NAME}\"\n{body}\nLARDER_KERNELS({})\n", list.join(", "))
}

/// Replaces declarations `extern __shared__ T name[];` by pointers to the block's dynamic shared
/// memory. C++ has no array of unknown length with a lifetime of a block.
fn replace_dynamic_shared(text: &str) -> String {
    const OPENING: &str = "extern __shared__";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(OPENING) {
        let declaration = &rest[start + OPENING.len()..];
        let Some(end) = declaration.find(';') else { break };
        out += &rest[..start];
        let words = declaration[..end].replace("[]", " ");
        let mut words: Vec<&str> = words.split_whitespace().filter(|word| !is_alignment(word)).collect();
        let name = words.pop().unwrap_or_default().to_string();
        let element = words.join(" ");
        out += &format!("{element} *const {name} = reinterpret_cast<{element} *>(::larder::dynamic_shared())");
        rest = &declaration[end..];
    }
    out + rest
}

fn is_alignment(word: &str) -> bool {
    word.starts_with("__align__(") || word.starts_with("alignas(")
}

/// One run of the compiler.
struct Step {
    child: Child,
    /// File that receives the compiler's messages. A pipe could fill up.
    log: PathBuf,
    file: &'static str,
}

impl Step {
    fn compile(folder: &Path, file: &'static str) -> Result<Step, DeviceError> {
        let arguments = [
            "-std=c++17",
            "-O2",
            "-w",
            "-fPIC",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            // Type-punned accesses are usual in kernels.
            "-fno-strict-aliasing",
            "-fsanitize=bounds,alignment",
            "-fno-sanitize-recover=bounds,alignment",
            "-c",
        ];
        Step::start(folder, file, &arguments, "cpp", "o")
    }

    /// A step of its own without `-fsanitize`, which would ask for a run-time library.
    fn link(folder: &Path, file: &'static str) -> Result<Step, DeviceError> {
        Step::start(folder, file, &["-shared"], "o", "so")
    }

    fn start(folder: &Path, file: &'static str, arguments: &[&str], from: &str, to: &str) -> Result<Step, DeviceError> {
        let compiler = std::env::var("CXX").unwrap_or_default();
        let mut words = compiler.split_whitespace();
        let program = words.next().unwrap_or("c++");
        let log = folder.join(file).with_extension("log");
        let messages =
            File::create(&log).map_err(|error| failed("create a file for the compiler's messages", &error))?;
        let child = Command::new(program)
            .args(words)
            .args(arguments)
            .arg(Path::new(file).with_extension(from))
            .arg("-o")
            .arg(Path::new(file).with_extension(to))
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages)
            // A group of its own, so that the deadline ends the compiler's children too.
            .process_group(0)
            .spawn()
            .map_err(|error| DeviceError::NoCompiler { compiler: program.to_string(), reason: error.to_string() })?;
        Ok(Step { child, log, file })
    }

    fn finish(mut self, deadline: Instant) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().map_err(|error| failed("wait for the compiler", &error))?;
            if let Some(status) = status {
                return if status.success() { Ok(()) } else { Err(self.rejected()) };
            }
            if Instant::now() >= deadline {
                // `Drop` ends the compiler.
                let waited_for = format!("the compilation of {}", self.file);
                return Err(DeviceError::Deadline { waited_for, after: start.elapsed() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn rejected(&self) -> DeviceError {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let message = String::from_utf8_lossy(&bytes[..bytes.len().min(MESSAGE_LIMIT)]).into_owned();
        DeviceError::Compile { compiler: "the C++ compiler", file: self.file.to_string(), message }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // A group that has just ended is gone, which is as good.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_shared_memory_becomes_a_pointer() {
        let text = "{ extern __shared__ __align__(16) unsigned char raw[]; int a[2]; }";
        let expected = "{ unsigned char *const raw = \
                        reinterpret_cast<unsigned char *>(::larder::dynamic_shared()); int a[2]; }";
        assert_eq!(replace_dynamic_shared(text), expected);
        assert_eq!(replace_dynamic_shared("__shared__ float tile[4];"), "__shared__ float tile[4];");
    }

    #[test]
    fn arguments_fit_parameters_of_their_type_only() {
        assert!(fits(&Arg::Null, b'r') && fits(&Arg::Null, b'w') && !fits(&Arg::Null, b'U'));
        assert!(fits(&Arg::U32(1), b'u') && !fits(&Arg::U32(1), b'i') && !fits(&Arg::U32(1), b'U'));
        assert!(fits(&Arg::F32(1.0), b'f') && fits(&Arg::I32(1), b'i') && fits(&Arg::U64(1), b'U'));
    }
}
