//! Functions that open and describe clients and buffers.

use crate::call::{self, Failure, Output, array, call, duration, read, read_optional, text, text_bytes};
use crate::handles;
use crate::types::*;
use larder_bindings::{Session, checked, opaque, runtime};
use larder_client::{ClientOptions, StoreUrl};
use larder_format::namespace::MAX_NAME_BYTES;
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::ffi::{CStr, c_char};

/// Maximum length of a buffer in bytes.
const BUFFER_BYTES_MAX: usize = 1 << 30;
const DEFAULT_TENANT: &str = "default";
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn larder_version() -> *const c_char {
    CStr::from_bytes_with_nul(VERSION.as_bytes()).unwrap_or_default().as_ptr()
}

/// Computes the key of the page with `tokens` that follows the page `previous`.
///
/// SHA-256 over the previous key and the tokens as 32-bit little-endian numbers. SGLang uses the
/// same chain. `previous` is null for the first page.
///
/// # Safety
/// `tokens` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_page_key(
    tokens: *const u32,
    count: usize,
    previous: *const LarderKey,
    key: *mut LarderKey,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let key = Output::new(key, 1, "key")?;
        let previous = read_optional(previous, "previous")?.map(|key| PageKey(key.bytes));
        let chained = PageKey::chain(previous.as_ref(), array(tokens, count, "tokens")?);
        key.write([LarderKey { bytes: chained.0 }]);
        Ok(())
    })
}

unsafe fn kv_namespace(layout: LarderKvLayout, model: &str, tenant: &str) -> call::Result<NamespaceDescriptor> {
    let LarderKvLayout { layers, kv_heads, head_dim, page_tokens, layers_per_part, head_groups, weights, .. } = layout;
    // SAFETY: the caller's promise.
    let dtype = match unsafe { text(layout.dtype, "dtype") }? {
        "float32" => KvDtype::F32,
        "float16" => KvDtype::F16,
        "bfloat16" => KvDtype::Bf16,
        _ => return Err(Failure::invalid("dtype is float32, float16 or bfloat16")),
    };
    let geometry = PageGeometry { dtype, layers, kv_heads, head_dim, page_tokens, layers_per_part, head_groups };
    Ok(checked(NamespaceDescriptor { model: model.into(), weights, geometry, tenant: tenant.into() })?)
}

unsafe fn descriptor(namespace: LarderNamespace) -> call::Result<NamespaceDescriptor> {
    // SAFETY: the caller's promise.
    unsafe {
        let identity = text_bytes(namespace.identity, "identity")?;
        let (model, tenant) = (text(namespace.model, "model")?, text(namespace.tenant, "tenant")?);
        let tenant = if tenant.is_empty() { DEFAULT_TENANT } else { tenant };
        let Some(layout) = read_optional(namespace.kv, "kv")? else {
            return Ok(opaque(namespace.page_bytes, namespace.parts, identity, model, tenant)?);
        };
        if namespace.page_bytes != 0 || namespace.parts != 0 || !identity.is_empty() {
            return Err(Failure::invalid("kv describes the pages: page_bytes, parts and identity must be 0"));
        }
        kv_namespace(layout, model, tenant)
    }
}

unsafe fn client_options(options: LarderOptions) -> call::Result<(StoreUrl, ClientOptions)> {
    // SAFETY: the caller's promise.
    let (url, name) = unsafe { (text(options.url, "url")?, text(options.name, "name")?) };
    let url: StoreUrl = url.parse().map_err(|error| Failure::invalid(format!("{error}")))?;
    let mut client = ClientOptions { name: "c".into(), ..ClientOptions::default() };
    if name.len() > MAX_NAME_BYTES {
        return Err(Failure::invalid(format!("name has {} bytes, at most {MAX_NAME_BYTES}", name.len())));
    }
    if !name.is_empty() {
        client.name = name.into();
    }
    if options.memory_bytes != 0 {
        client.memory_bytes = usize::try_from(options.memory_bytes).map_err(|_| Failure::invalid("memory_bytes"))?;
    }
    if options.connect_timeout_us != 0 {
        client.connect_timeout = duration(options.connect_timeout_us, "connect_timeout_us")?;
    }
    Ok((url, client))
}

/// Opens a client of one namespace. Returns at once: connections are made in the background, and
/// again whenever they are lost. See larder_client_ready.
///
/// # Safety
/// The pointers and texts are valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_client_open(
    options: *const LarderOptions,
    name_space: *const LarderNamespace,
    client: *mut LarderClient,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let client = Output::new(client, 1, "client")?;
        let (url, options) = client_options(read(options, "options")?)?;
        let descriptor = descriptor(read(name_space, "name_space")?)?;
        client.write([handles::open_client(|| Session::new(url, descriptor, options))?]);
        Ok(())
    })
}

/// Closes a client. Calls in progress go on, and its connections end with the last of them.
#[unsafe(no_mangle)]
pub extern "C" fn larder_client_close(client: LarderClient) -> LarderStatus {
    call(|| handles::close_client(client))
}

/// Waits until all nodes of the URL are connected, or one of them and a second has passed.
///
/// `ready` is set to true if a node is connected.
///
/// # Safety
/// `ready` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_client_ready(client: LarderClient, timeout_us: u64, ready: *mut bool) -> LarderStatus {
    call(|| {
        // SAFETY: the caller's promise.
        let ready = unsafe { Output::new(ready, 1, "ready") }?;
        let ((client, _), timeout) = (handles::attached(client)?, duration(timeout_us, "timeout_us")?);
        ready.write([runtime()?.block_on(client.ready(timeout))]);
        Ok(())
    })
}

/// Describes a client. Never waits.
///
/// # Safety
/// `info` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_client_describe(client: LarderClient, info: *mut LarderClientInfo) -> LarderStatus {
    call(|| {
        // SAFETY: the caller's promise.
        let info = unsafe { Output::new(info, 1, "info") }?;
        let (client, namespace) = handles::attached(client)?;
        let geometry = &namespace.geometry;
        info.write([LarderClientInfo {
            page_bytes: geometry.page_bytes(),
            parts: geometry.part_count(),
            part_bytes: geometry.part_bytes(0),
            nodes_connected: client.nodes_connected(),
            namespace_id: namespace.id().0,
        }]);
        Ok(())
    })
}

/// Counters of a client. Never waits.
///
/// # Safety
/// `stats` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_client_stats(client: LarderClient, stats: *mut LarderStats) -> LarderStatus {
    call(|| {
        // SAFETY: the caller's promise.
        let output = unsafe { Output::new(stats, 1, "stats") }?;
        let stats = handles::attached(client)?.0.stats();
        output.write([LarderStats {
            get_hits: stats.get_hits,
            get_misses: stats.get_misses,
            gets_busy: stats.gets_busy,
            corrupt: stats.corrupt,
            puts: stats.puts,
            puts_lost: stats.puts_lost,
            puts_busy: stats.puts_busy,
        }]);
        Ok(())
    })
}

/// Allocates memory of the client, of at most 1 GiB. A put from it is not copied in this process.
///
/// `is_shared` may be null. It is set to true if a node on this machine and RDMA devices can read
/// the memory in place; otherwise the client's shared memory is used up.
///
/// # Safety
/// The outputs may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_buffer_open(
    client: LarderClient,
    size: usize,
    buffer: *mut LarderBuffer,
    memory: *mut LarderMemory,
    is_shared: *mut bool,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let (buffer, memory) = (Output::new(buffer, 1, "buffer")?, Output::new(memory, 1, "memory")?);
        let is_shared = Output::optional(is_shared, 1, "is_shared")?;
        if size == 0 || size > BUFFER_BYTES_MAX {
            return Err(Failure::invalid(format!("a buffer has 1 to {BUFFER_BYTES_MAX} bytes")));
        }
        let opened = handles::open_buffer(&handles::attached(client)?.0, size)?;
        buffer.write([opened.0]);
        memory.write([opened.1]);
        is_shared.write([opened.2]);
        Ok(())
    })
}

/// Frees the memory of a buffer, once no transfer uses it. The program must not access it any more.
///
/// A buffer may outlive its client.
#[unsafe(no_mangle)]
pub extern "C" fn larder_buffer_close(buffer: LarderBuffer) -> LarderStatus {
    call(|| handles::close_buffer(buffer))
}
