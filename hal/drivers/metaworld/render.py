"""Draws MetaWorld scenes on a CPU, fast enough for a robot's camera.

What a frame of `corner2` costs in processor time with Mesa's software renderer: mujoco.Renderer as MetaWorld sets it up
64 ms; without shadows, reflections and multisampling, at 192x192 and with meshes coarsened to 6 mm 7.0 ms; at 128x128
and coarsened to about a pixel 2.7 ms. Most of it is the 67,000 triangles of the arm, of which 5,000 are left then. Four
samples a pixel at 64x64 would cost 5.4 ms: the mean of four drawn pixels is the cheaper way to the same picture.
A `Renderer` costs one GL context (0.02 s) and for each model it draws a set of meshes and textures (0.2 s for the
first, 0.05 s for the next).
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.drivers.metaworld.simulation import import_simulator
from wire.errors import RenderError

_VIEW_M = 2.0
"""about how wide the scene is that a camera sees"""
_MESH_CELL_PX = 1.3
"""Vertices within one cell of so many pixels become one."""
_MAX_GEOMS = 1000
_PACKAGES = "libegl1 libgl1 libgl1-mesa-dri libgles2 libosmesa6"


def render_error(error: BaseException, what: str) -> RenderError:
    """The `RenderError` that names the system packages and the variable that matter."""
    return RenderError(
        f"{what} ({type(error).__name__}: {error}). MUJOCO_GL is '{os.environ.get('MUJOCO_GL', '')}'; on Debian "
        f"`apt-get install {_PACKAGES}` and set MUJOCO_GL=egl (or osmesa) before the program starts."
    )


@dataclass(slots=True)
class _Picture:
    """What is kept for one model."""

    model: Any
    context: Any
    scene: Any
    camera: Any
    upside_down: bool


class Renderer:
    """Draws what one named camera sees. Make, use and close it in one thread: a GL context belongs to a thread."""

    def __init__(self, camera: str, size_px: int) -> None:
        """Raises `RenderError` when this machine cannot draw."""
        self._mujoco, _ = import_simulator()
        self._camera = camera
        self._size = size_px
        self._pictures: dict[int, _Picture] = {}
        self._option = self._mujoco.MjvOption()
        self._pert = self._mujoco.MjvPerturb()
        self._rect = self._mujoco.MjrRect(0, 0, size_px, size_px)
        self._pixels = np.empty((size_px, size_px, 3), np.uint8)
        try:
            self._gl = _gl_context(self._mujoco, size_px)
            self._gl.make_current()
        except Exception as error:  # each GL stack fails in its own way
            raise render_error(error, "this machine has no OpenGL to draw with") from error

    def render(self, model: Any, data: Any) -> np.ndarray:
        """uint8[size, size, 3], RGB, upright, of `data` (a mujoco.MjData whose kinematics are up to date)."""
        mujoco = self._mujoco
        try:
            self._gl.make_current()
            picture = self._picture(model)
            mujoco.mjv_updateScene(
                model,
                data,
                self._option,
                self._pert,
                picture.camera,
                mujoco.mjtCatBit.mjCAT_ALL.value,
                picture.scene,
            )
            # Another model's picture may have been the last one: without this the drawing lands in its buffer.
            mujoco.mjr_restoreBuffer(picture.context)
            mujoco.mjr_render(self._rect, picture.scene, picture.context)
            mujoco.mjr_readPixels(self._pixels, None, self._rect, picture.context)
        except RenderError:
            raise
        except Exception as error:
            raise render_error(error, f"camera '{self._camera}' could not be drawn") from error
        # OpenGL's rows go up. A camera that hangs upside down needs half a turn: only left and right are left to swap.
        turned = self._pixels[:, ::-1] if picture.upside_down else self._pixels[::-1]
        return np.ascontiguousarray(turned)

    def close(self) -> None:
        """Free the GL objects. May be called twice."""
        if self._gl is None:
            return
        self._gl.make_current()
        for picture in self._pictures.values():
            picture.context.free()
        self._pictures.clear()
        self._gl.free()
        self._gl = None

    def _picture(self, model: Any) -> _Picture:
        known = self._pictures.get(id(model))
        if known is None:
            known = self._pictures[id(model)] = self._load(model)
        return known

    def _load(self, model: Any) -> _Picture:
        mujoco = self._mujoco
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        camera.fixedcamid = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, self._camera)
        if camera.fixedcamid < 0:
            names = [model.camera(i).name for i in range(model.ncam)]
            raise RenderError(f"MetaWorld has no camera '{self._camera}'; it has {', '.join(names)}.")
        # Only what is drawn gets simpler: contacts are computed from the model itself.
        drawn = coarsen_meshes(model, _MESH_CELL_PX * _VIEW_M / self._size)
        drawn.vis.quality.shadowsize = 0
        drawn.vis.quality.offsamples = 0
        drawn.vis.global_.offwidth = drawn.vis.global_.offheight = self._size
        context = mujoco.MjrContext(drawn, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        scene = mujoco.MjvScene(model, _MAX_GEOMS)
        scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        up = np.zeros(9)
        mujoco.mju_quat2Mat(up, model.cam_quat[camera.fixedcamid])
        return _Picture(model, context, scene, camera, upside_down=bool(up[7] < 0))


def coarsen_meshes(model: Any, cell_m: float) -> Any:
    """A copy of `model` whose meshes have one vertex per cell of `cell_m` metres and no triangle twice.

    Vertex clustering (Rossignac and Borrel 1993, "Multi-resolution 3D approximations for rendering complex scenes").
    """
    model = copy.copy(model)
    per_face = ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")
    for mesh in range(model.nmesh):
        vertices = slice(model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh])
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        position = model.mesh_vert[vertices]
        cells = np.floor((position - position.min(0)) / cell_m).astype(np.int64)
        size = cells.max(0) + 1
        _, cluster = np.unique((cells[:, 0] * size[1] + cells[:, 1]) * size[2] + cells[:, 2], return_inverse=True)
        weight = np.bincount(cluster)
        middle = np.stack([np.bincount(cluster, position[:, axis]) / weight for axis in range(3)], 1)
        corners = np.sort(cluster[model.mesh_face[first : first + count]], axis=1)
        solid = np.flatnonzero((corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2]))
        kept = len(weight)
        key = (corners[solid, 0] * kept + corners[solid, 1]) * kept + corners[solid, 2]
        faces = solid[np.sort(np.unique(key, return_index=True)[1])]
        if not len(faces):
            continue  # smaller than a cell: stays as it is
        model.mesh_vert[vertices] = middle[cluster]
        for name in per_face:
            array = getattr(model, name)
            array[first : first + len(faces)] = array[first + faces]
        model.mesh_facenum[mesh] = len(faces)
    return model


def _gl_context(mujoco: Any, size_px: int) -> Any:
    backend = os.environ["MUJOCO_GL"].lower()
    # By name: `mujoco.GLContext` is what the variable said when mujoco was first imported, perhaps by someone else.
    if backend == "egl":
        from mujoco.egl import GLContext
    elif backend == "osmesa":
        from mujoco.osmesa import GLContext
    else:
        GLContext = mujoco.GLContext  # noqa: N806 - as the two imports call it
    return GLContext(size_px, size_px)
