// Whether this library holds code for the current device.
#pragma once

namespace engram {

bool has_image_for_device();

}  // namespace engram
