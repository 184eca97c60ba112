/* Prints the bits per value that a scheme costs, through the installed C header alone. */
#include <inttypes.h>
#include <stdio.h>

#include "statepack/statepack.h"

int main(void) {
  const sp_layer_shape layer = {16, 48, 128, 128, SP_GATE_SCALAR};
  sp_scheme* scheme = NULL;
  sp_bits bits = {.struct_size = sizeof bits};
  if (sp_api_version() != SP_API_VERSION ||
      sp_scheme_compile("int8,period=16", &layer, 1, NULL, NULL, &scheme) != SP_OK ||
      sp_scheme_bits(scheme, &bits) != SP_OK) {
    fprintf(stderr, "%s\n", sp_last_error());
    return 1;
  }
  printf("int8,period=16: %.3f payload bits and %.3f resident bits for each of %" PRId64
         " values\n",
         bits.payload_bits, bits.resident_bits, bits.n_values);
  sp_scheme_destroy(scheme);
  return 0;
}
